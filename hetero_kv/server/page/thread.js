// Shows the messages of a conversation.

import { AnswerView } from "./answer_view.js";
import { byId, make } from "./dom.js";
import { questionView } from "./question_view.js";

/** The messages of the conversation that is open. `actions`: {edit(number, text), askAgain(number), look, lookEnd}. */
export class Thread {
  constructor(actions) {
    this.actions = actions;
    this.place = byId("thread");
    this.scroller = byId("scroll");
    this.views = new Map();
    this.follows = true;
    this.scroller.addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = this.scroller;
      this.follows = scrollHeight - scrollTop - clientHeight < 80;
    });
  }

  /** Shows all messages of a conversation; `answeringOf` gives what is under way for an answer, or null. */
  show(conversation, answeringOf) {
    this.views.clear();
    const nodes = conversation.messages.map((message, number) => this.node(message, number));
    this.place.replaceChildren(...(nodes.length ? nodes : [welcome()]));
    for (const message of conversation.messages) {
      const answering = answeringOf(message);
      if (answering) this.update(message, answering);
    }
    this.follows = true;
    this.follow();
  }

  /** Shows an answer as it is now, if it is of this conversation. */
  update(answer, answering) {
    this.views.get(answer)?.update(answering);
    this.follow();
  }

  /** Scrolls to the word that is chosen, which what opens below may cover. */
  showChosenWord() {
    this.place.querySelector('.token[aria-pressed="true"]')?.scrollIntoView({ block: "center" });
  }

  /** Ends the choosing of words; whether there was any. */
  endLooking() {
    const looking = [...this.views.values()].filter((view) => view.isLooking);
    for (const view of looking) view.setLooking(false);
    return looking.length > 0;
  }

  node(message, number) {
    if (message.role === "user") return questionView(message, (text) => this.actions.edit(number, text));
    const view = new AnswerView(message, {
      askAgain: () => this.actions.askAgain(number),
      look: (token, text) => this.actions.look(message, token, text),
      lookMode: (isOn) => {
        if (!isOn) this.actions.lookEnd();
        else for (const other of this.views.values()) if (other !== view) other.setLooking(false);
      },
    });
    this.views.set(message, view);
    return view.element;
  }

  follow() {
    if (this.follows) this.scroller.scrollTop = this.scroller.scrollHeight;
  }
}

const welcome = () =>
  make(
    "div",
    { class: "welcome" },
    make("h2", {}, "Ask about long documents"),
    make(
      "p",
      {},
      "Drop a text, PDF, Word or HTML file here, then ask. The document is read once; later questions begin at once. ",
      "Each word of an answer can show you which passages it looked at.",
    ),
  );
