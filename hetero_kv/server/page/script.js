// The page: a chat with documents.

import { remove } from "./api.js";
import { toast } from "./announcer.js";
import { Answering, newAnswer } from "./answering.js";
import { Attention } from "./attention.js";
import { Composer } from "./composer.js";
import { contextParts, showContext } from "./context_bar.js";
import * as conversations from "./conversations.js";
import { countTokens, Documents } from "./documents.js";
import { byId } from "./dom.js";
import { Models } from "./models.js";
import { openSettings } from "./settings_dialog.js";
import { Sidebar } from "./sidebar.js";
import { remember, remembered } from "./tab_storage.js";
import { Thread } from "./thread.js";

const CURRENT = "hetero-kv.current";
const SAVED_EVERY_MS = 2000;

/** Answers under way, by their messages. */
const running = new Map();
/** Documents whose tokens were counted for a model, or could not be. */
const counted = new Set();
let current = conversations.begin(null);
let isDrawn = true;
let savedAt = 0;

const models = new Models((id) => {
  current.model = id;
  if (current.messages.length) store(current);
  showAll();
});
const documents = new Documents(() => {
  composer.update();
  showUse();
});
const composer = new Composer(documents, { ask: (text) => askNew(text), stop: () => underWay(current)?.stop() });
const attention = new Attention(
  () => thread.showChosenWord(),
  () => thread.endLooking(),
);
const thread = new Thread({
  edit: (number, text) => {
    const { files } = current.messages[number];
    rewind(number);
    ask({ role: "user", text, files });
  },
  askAgain: (number) => {
    rewind(number);
    ask(null);
  },
  look: (answer, token, text) => attention.look(answer, token, text),
  lookEnd: () => attention.close(),
});
const sidebar = new Sidebar({
  open,
  rename: (id, title) => {
    const conversation = conversations.find(id);
    Object.assign(conversation, { title, isNamed: true });
    store(conversation);
    showAll();
  },
  remove: forget,
  begin: () => {
    show(conversations.begin(current));
    byId("question").focus();
  },
});

/** The answer under way in a conversation, or undefined. */
const underWay = (conversation) => [...running.values()].find((each) => each.conversation === conversation);

function store(conversation) {
  savedAt = performance.now();
  const { removed, isStored } = conversations.save(conversation);
  for (const oldest of removed) {
    toast(`This browser's storage is full: “${oldest.title}”, the oldest conversation, was removed.`);
    removeFiles(conversations.ownFiles(oldest));
  }
  if (!isStored && !conversation.isUnstored) {
    conversation.isUnstored = true;
    toast("This browser cannot store the conversation; it is gone when you close the page.");
  }
}

/** Removes documents from the server. */
const removeFiles = (ids) => ids.forEach((id) => remove(`v1/files/${id}`).catch(() => {}));

/** Makes a conversation the open one. */
function show(conversation) {
  current = conversation;
  remember(CURRENT, conversation.id);
  attention.close();
  const last = conversation.messages.at(-1);
  if (last?.role === "assistant" && !last.finish && !running.has(last)) {
    Object.assign(last, { finish: "broken", error: "The page was closed in the middle of the answer. Ask again." });
  }
  thread.show(conversation, (message) => running.get(message) ?? null);
  showAll();
}

function open(id) {
  const found = conversations.find(id);
  if (found) show(found);
}

/** Shows all that depends on the open conversation but its messages. */
function showAll() {
  byId("title").textContent = current.title;
  document.title = current.messages.length ? `${current.title} · hetero-kv` : "hetero-kv";
  models.show(current);
  documents.model = current.model;
  const ids = new Set([...running.values()].map(({ conversation }) => conversation.id));
  sidebar.show(conversations.list(), current.id, ids);
  composer.update(underWay(current) !== undefined);
  showUse();
}

/** Shows what fills the context. */
function showUse() {
  const answering = underWay(current);
  const last = current.messages.findLast(({ role, usage }) => role === "assistant" && usage);
  const passing = answering?.progress
    ? { prompt_tokens: answering.progress.total, completion_tokens: answering.answerTokens }
    : null;
  const files = [...conversations.filesOf(current), ...documents.ready];
  const capacity = models.capacity(current.model);
  showContext(contextParts({ files, usage: passing ?? last?.usage, capacity, model: current.model }));
  // For another model, or of another visit.
  for (const file of files) {
    const name = `${file.id} ${current.model}`;
    if (!counted.has(name)) {
      counted.add(name);
      countTokens(file, current.model).then(showUse);
    }
  }
}

/** Takes the messages from number `number` on out of the open conversation. */
function rewind(number) {
  underWay(current)?.stop();
  attention.close();
  current.messages.splice(number);
}

function askNew(text) {
  const files = documents.take();
  if (!current.isNamed && current.messages.length === 0) current.title = conversations.titleOf(text, files);
  ask({ role: "user", text, files });
}

/** Asks the model, with a further question or with none. */
async function ask(question) {
  const conversation = current;
  if (question) conversation.messages.push(question);
  const answer = newAnswer(models.of(conversation));
  conversation.messages.push(answer);
  conversation.updated = Date.now();
  const answering = new Answering(conversation, answer, draw);
  running.set(answer, answering);
  store(conversation);
  show(conversation);
  // The button that was pressed may be gone with the messages.
  if (document.activeElement === document.body && matchMedia("(hover: hover)").matches) byId("question").focus();
  await answering.run();
  running.delete(answer);
  if (conversations.find(conversation.id) === conversation) store(conversation);
  if (conversation === current) {
    thread.update(answer, null);
    showAll();
  } else {
    sidebar.show(conversations.list(), current.id, new Set());
  }
}

/** Draws an answer under way at the next frame. */
function draw(answering) {
  if (performance.now() - savedAt > SAVED_EVERY_MS && conversations.find(answering.conversation.id))
    store(answering.conversation);
  if (!isDrawn || answering.conversation !== current) return;
  isDrawn = false;
  requestAnimationFrame(() => {
    isDrawn = true;
    if (answering.conversation !== current || !running.has(answering.answer)) return;
    thread.update(answering.answer, answering);
    showUse();
  });
}

/** Deletes a conversation and, unless that is undone, its documents on the server. */
function forget(id) {
  const conversation = conversations.find(id);
  underWay(conversation)?.stop();
  const files = conversations.ownFiles(conversation);
  conversations.remove(id);
  if (conversation === current) show(conversations.begin(current));
  else showAll();
  const undo = () => {
    store(conversation);
    show(conversation);
  };
  const text = `Deleted “${conversation.title}”${files.length ? " and its documents" : ""}.`;
  toast(text, { label: "Undo", run: undo }, () => removeFiles(files));
}

addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open]")) return;
  const answering = underWay(current);
  if (answering) answering.stop();
  else if (attention.isOpen) attention.close();
  else thread.endLooking();
});

byId("open-settings").addEventListener("click", async () => {
  const defaults = await models.defaultsOf(current.model).catch(() => ({}));
  openSettings(current, defaults, (settings) => {
    Object.assign(current, settings);
    if (current.messages.length) store(current);
  });
});

conversations.open((id) => {
  // Another tab changed it; an answer under way here goes on.
  if (id === current.id && !underWay(current) && conversations.find(id)) open(id);
  else showAll();
});
open(remembered(CURRENT));
if (!current.messages.length) show(current);
models
  .load()
  .then(showAll)
  .catch((error) => toast(`The models cannot be listed: ${error.message}`));
if (matchMedia("(hover: hover)").matches) byId("question").focus();
