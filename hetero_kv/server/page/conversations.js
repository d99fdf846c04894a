// The conversations of this browser, kept in its storage, the most recent ones.
//
// A conversation: {id, title, isNamed, updated, model, system, sampling: {temperature, top_p, max_tokens}, messages}.
// A message of the user: {role, text, files: [{id, name, tokens: {model: count}}]}.
// An answer: {role, text, thoughts, marks, thoughtMarks, responseId, model, usage, timings, measured, finish, error}.
// Its marks say which token the text comes from: {ends, tokens}, text up to `ends[i]` from token `tokens[i]`.

const PREFIX = "hetero-kv.conversation.";
const MOST = 60;
// Browsers give 5 MB, in UTF-16, to all that a host stores.
const MOST_CHARACTERS = 2_000_000;

const all = new Map();
// Browsers may forbid it: then conversations last as long as the page.
let isStoring = true;

function read(name) {
  const id = name.slice(PREFIX.length);
  all.delete(id);
  try {
    const found = JSON.parse(localStorage.getItem(name));
    if (Array.isArray(found?.messages)) all.set(id, found);
  } catch {
    // Another version's.
  }
}

/** Reads what is stored; `onChange` gets the id of a conversation that another tab changes. */
export function open(onChange) {
  try {
    for (let number = 0; number < localStorage.length; number++) {
      if (localStorage.key(number).startsWith(PREFIX)) read(localStorage.key(number));
    }
  } catch {
    isStoring = false;
  }
  addEventListener("storage", ({ key }) => {
    if (!key?.startsWith(PREFIX)) return;
    read(key);
    onChange(key.slice(PREFIX.length));
  });
}

/** All conversations, the most recent first. */
export const list = () => [...all.values()].sort((one, other) => other.updated - one.updated);

/** A conversation by its id, or undefined. */
export const find = (id) => all.get(id);

/** A conversation without messages, with the settings of `previous`; it is stored with its first message. */
export function begin(previous) {
  return {
    id: Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join(""),
    title: "New conversation",
    isNamed: false,
    updated: Date.now(),
    model: previous?.model ?? null,
    system: previous?.system ?? "",
    sampling: { ...previous?.sampling },
    messages: [],
  };
}

/**
 * Stores a conversation.
 *
 * Returns the oldest ones that had to go, and whether this one is stored.
 */
export function save(conversation) {
  all.set(conversation.id, conversation);
  const removed = [];
  const drop = () => {
    removed.push(list().findLast((each) => each.id !== conversation.id));
    remove(removed.at(-1).id);
  };
  while (all.size > MOST) drop();
  const text = JSON.stringify(conversation);
  let isStored = isStoring && write(conversation.id, text);
  while (isStoring && !isStored && all.size > 1 && text.length <= MOST_CHARACTERS) {
    drop();
    isStored = write(conversation.id, text);
  }
  return { removed, isStored };
}

/** Whether a conversation's text could be stored. */
function write(id, text) {
  if (storedCharacters(id) + text.length > MOST_CHARACTERS) return false;
  try {
    localStorage.setItem(PREFIX + id, text);
    return true;
  } catch {
    return false;
  }
}

/** Forgets a conversation. */
export function remove(id) {
  all.delete(id);
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // It was not stored.
  }
}

/** The documents that no conversation but this one has, by their ids. */
export function ownFiles(conversation) {
  const others = list().filter((each) => each.id !== conversation.id);
  const used = new Set(others.flatMap(filesOf).map((file) => file.id));
  return [...new Set(filesOf(conversation).map((file) => file.id))].filter((id) => !used.has(id));
}

/** All documents of a conversation. */
export const filesOf = (conversation) => conversation.messages.flatMap((message) => message.files ?? []);

/** A title from the first question. */
export function titleOf(text, files) {
  const words = text.trim().split(/\s+/).join(" ") || files.map((file) => file.name).join(", ");
  return words.length > 60 ? `${words.slice(0, 58).trimEnd()}…` : words || "New conversation";
}

function storedCharacters(except) {
  let sum = 0;
  for (let number = 0; number < localStorage.length; number++) {
    const name = localStorage.key(number);
    if (name.startsWith(PREFIX) && name !== PREFIX + except) sum += localStorage.getItem(name).length;
  }
  return sum;
}
