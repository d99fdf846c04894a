// Shows what fills the context: documents, the conversation, the answer, and what is left.

import { tokensOf } from "./documents.js";
import { byId, make } from "./dom.js";
import { count, percent } from "./formats.js";

/** The parts of a context: [{name, tokens}], the room left at the end; null while nothing is known. */
export function contextParts({ files, usage, capacity, model }) {
  const documents = files.reduce((sum, file) => sum + (tokensOf(file, model) ?? 0), 0);
  const prompt = usage?.prompt_tokens ?? 0;
  if (!capacity || (!documents && !prompt)) return null;
  const within = prompt ? Math.min(documents, prompt) : documents;
  const answer = usage?.completion_tokens ?? 0;
  const parts = [
    { name: "Documents", kind: "use-documents", tokens: within },
    { name: "Conversation", kind: "use-conversation", tokens: Math.max(0, prompt - within) },
    { name: "Answer", kind: "use-answer", tokens: answer },
  ];
  const used = parts.reduce((sum, part) => sum + part.tokens, 0);
  return [...parts, { name: "Room left", kind: "use-room", tokens: Math.max(0, capacity - used), used, capacity }];
}

/** Shows the parts, or nothing. */
export function showContext(parts) {
  const place = byId("context");
  place.hidden = parts === null;
  if (parts === null) return;
  const { used, capacity } = parts.at(-1);
  const isOver = used > capacity;
  const bar = make("div", { class: "context-bar", "aria-hidden": "true" });
  for (const part of parts.slice(0, -1)) {
    if (!part.tokens) continue;
    const piece = make("span", { class: part.kind });
    piece.style.flexGrow = part.tokens;
    bar.append(piece);
  }
  const room = make("span", { class: "use-room" });
  room.style.flexGrow = parts.at(-1).tokens;
  bar.append(room);
  place.classList.toggle("is-over", isOver);
  place.replaceChildren(
    bar,
    make(
      "dl",
      { class: "context-parts" },
      parts
        .filter((part) => part.tokens || part.kind === "use-room")
        .map((part) =>
          make("div", { class: part.kind }, make("dt", {}, part.name), make("dd", {}, count(part.tokens))),
        ),
    ),
    make(
      "p",
      { class: "context-sum" },
      isOver
        ? `${count(used)} tokens are more than the context's ${count(capacity)}`
        : `${count(used)} of ${count(capacity)} tokens (${percent(used / capacity)})`,
    ),
  );
}
