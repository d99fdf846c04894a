// Shows an answer: its thoughts, its text, what it took, and what can be done with it.

import { Reader } from "./announcer.js";
import { copyButton } from "./clipboard.js";
import { icon, iconButton, make } from "./dom.js";
import { count, counted, duration, rate } from "./formats.js";
import { show } from "./markdown.js";
import { choosable, plainNodes, tokenNodes } from "./token_buttons.js";

const ENDS = {
  length: "The answer reached the longest length, or the context is full.",
  stopped: "Stopped.",
  broken: "",
};

/** The view of an answer. `actions`: {askAgain(), look(token, text), lookMode(isOn)}. */
export class AnswerView {
  constructor(answer, actions) {
    this.answer = answer;
    this.actions = actions;
    this.isLooking = false;
    this.reader = null;
    this.thoughts = make("div", { class: "prose" });
    this.thoughtsTitle = make("summary", {}, "Thoughts");
    this.folded = make("details", { class: "thoughts", hidden: true }, this.thoughtsTitle, this.thoughts);
    this.text = make("div", { class: "prose" });
    this.progress = make("div", { class: "prefill", hidden: true });
    this.note = make("p", { class: "note", hidden: true });
    this.hint = make(
      "p",
      { class: "hint looking-hint", hidden: true },
      "Choose a word of the answer to see what it looked at. Arrow keys move between words, Enter looks.",
    );
    this.figures = make("p", { class: "figures" });
    this.lookButton = make(
      "button",
      {
        type: "button",
        class: "button quiet small",
        "aria-pressed": "false",
        on: { click: () => this.setLooking(!this.isLooking, true) },
      },
      icon("look"),
      "What did it look at?",
    );
    this.buttons = make(
      "div",
      { class: "message-buttons" },
      this.lookButton,
      copyButton(() => answer.text, "Copy the answer"),
      iconButton("again", "Ask again", () => actions.askAgain()),
    );
    this.content = make("div", { class: "content" }, this.folded, this.text);
    this.element = make(
      "article",
      { class: "message answer", "aria-label": "Answer" },
      this.progress,
      this.content,
      this.note,
      this.hint,
      make("footer", { class: "message-foot" }, this.buttons, this.figures),
    );
    this.choosing = choosable(this.content, (token, text) => actions.look(token, text));
    this.update(null);
  }

  /** Shows the answer as it is now; `answering` while it is under way, else null. */
  update(answering) {
    const { answer } = this;
    const nodes = (marks) => (this.isLooking ? tokenNodes(marks) : plainNodes);
    show(this.text, answer.text, nodes(answer.marks));
    this.folded.hidden = answer.thoughts === "";
    if (answer.thoughts) {
      show(this.thoughts, answer.thoughts, nodes(answer.thoughtMarks));
      this.thoughtsTitle.textContent = answering && !answer.text ? "Thinking…" : "Thoughts";
    }
    this.element.classList.toggle("under-way", answering !== null);
    this.element.setAttribute("aria-busy", String(answering !== null));
    this.showPrefill(answering);
    this.buttons.hidden = answering !== null;
    const hasTokens = answer.marks.ends.length + answer.thoughtMarks.ends.length > 0;
    // The server remembers answers that came to their end.
    this.lookButton.hidden = !hasTokens || !["stop", "length", "stopped"].includes(answer.finish);
    const note = answering ? "" : (answer.error ?? ENDS[answer.finish] ?? "");
    this.note.textContent = note;
    this.note.hidden = note === "";
    this.note.classList.toggle("is-error", Boolean(answer.error));
    this.figures.textContent = answering ? liveFigures(answering) : figures(answer);
    this.figures.title = [answer.model, answer.timings?.cache_text].filter(Boolean).join("\n");
    this.announce(answering);
  }

  /** Turns the words into buttons, or back. */
  setLooking(isOn, isFocused = false) {
    if (isOn === this.isLooking) return;
    this.isLooking = isOn;
    this.lookButton.setAttribute("aria-pressed", String(isOn));
    this.hint.hidden = !isOn;
    this.content.classList.toggle("looking", isOn);
    for (const element of [this.text, this.thoughts]) {
      element.replaceChildren();
      element.shownBlocks = [];
    }
    this.update(null);
    this.actions.lookMode(isOn);
    if (isOn) this.choosing.start(isFocused);
  }

  showPrefill(answering) {
    const isWaiting = answering !== null && answering.firstAt === null;
    this.progress.hidden = !isWaiting;
    if (!isWaiting) return;
    const { progress } = answering;
    if (!progress || progress.total === 0) {
      this.progress.replaceChildren(make("span", { class: "waiting" }, "Waiting for the model…"));
      return;
    }
    const seconds = answering.prefill.secondsTo(progress.total);
    const left = seconds === null ? "" : ` · about ${duration(Math.ceil(seconds))} left`;
    const cached = progress.cache ? ` · ${count(progress.cache)} known already` : "";
    this.bar ??= make("progress", { "aria-label": "Reading the prompt" });
    this.bar.max = progress.total;
    this.bar.value = progress.processed;
    this.progressText ??= make("span", { class: "progress-text" });
    const done = `Reading ${count(progress.processed)} of ${counted(progress.total, "token")}`;
    this.progressText.textContent = `${done}${cached}${left}`;
    if (this.bar.parentNode !== this.progress) this.progress.replaceChildren(this.progressText, this.bar);
  }

  announce(answering) {
    if (answering) this.reader ??= new Reader();
    this.reader?.read(this.answer.text, answering === null);
    if (!answering) this.reader = null;
  }
}

function liveFigures(answering) {
  if (answering.firstAt === null) return "";
  const speed = answering.rate === null ? "" : ` · ${rate(answering.rate)}`;
  return `${counted(answering.answerTokens, "token")}${speed}`;
}

/** "120 tokens · 14 tokens/s · first after 2.1 s · 3,000 of 3,100 cached · adaptive" */
function figures({ usage, timings, measured, model }) {
  const parts = [];
  const speed = timings?.predicted_per_second ?? measured?.rate;
  if (timings || measured) parts.push(counted(timings?.predicted_n ?? measured.tokens, "token"));
  if (speed) parts.push(rate(speed));
  if (timings) parts.push(`first after ${duration(timings.prompt_ms / 1000)}`);
  if (timings && usage) parts.push(`${count(timings.cache_n)} of ${count(usage.prompt_tokens)} cached`);
  if (model) parts.push(model.split(":").at(-1));
  return parts.join(" · ");
}
