// Asks the model: turns a conversation into a request, and its events into an answer.

import { stream } from "./api.js";
import { addMark, noMarks } from "./marks.js";
import { Pace } from "./pace.js";

/** An answer that has not begun. */
export const newAnswer = (model) => ({
  role: "assistant",
  model,
  text: "",
  thoughts: "",
  marks: noMarks(),
  thoughtMarks: noMarks(),
});

/** The messages of a request. Answers without text are left out; what the user said around them is one message. */
export function requestMessages(conversation) {
  const messages = [];
  if (conversation.system.trim()) messages.push({ role: "system", content: conversation.system.trim() });
  for (const message of conversation.messages) {
    if (message.role === "user") {
      const parts = message.files.map((file) => ({ type: "file", file: { file_id: file.id } }));
      if (message.text) parts.push({ type: "text", text: message.text });
      if (messages.at(-1)?.role === "user") messages.at(-1).content.push(...parts);
      else messages.push({ role: "user", content: parts });
    } else if (message.text) {
      messages.push({ role: "assistant", content: message.text });
    }
  }
  return messages;
}

/** An answer under way: fills `answer`, calls `onChange` behind each event. */
export class Answering {
  constructor(conversation, answer, onChange) {
    this.conversation = conversation;
    this.answer = answer;
    this.onChange = onChange;
    this.began = performance.now();
    /** llama-server's prompt_progress while the prompt passes, else null. */
    this.progress = null;
    this.prefill = new Pace();
    this.answerTokens = 0;
    this.firstAt = null;
    this.abort = new AbortController();
  }

  /** Ends the answer where it is. */
  stop() {
    this.abort.abort();
  }

  /** Tokens per second of the answer so far, or null. */
  get rate() {
    const seconds = (performance.now() - this.firstAt) / 1000;
    return this.answerTokens > 1 && seconds > 0.3 ? (this.answerTokens - 1) / seconds : null;
  }

  /** Runs to the end. Errors end up in the answer. */
  async run() {
    const { conversation, answer } = this;
    const { temperature, top_p, max_tokens } = conversation.sampling;
    const body = {
      model: answer.model,
      messages: requestMessages(conversation),
      stream: true,
      stream_options: { include_usage: true },
      return_progress: true,
      return_tokens: true,
      ...(temperature === undefined ? {} : { temperature }),
      ...(top_p === undefined ? {} : { top_p }),
      ...(max_tokens === undefined ? {} : { max_completion_tokens: max_tokens }),
    };
    try {
      for await (const chunk of stream("v1/chat/completions", body, this.abort.signal)) {
        this.take(chunk);
        this.onChange(this);
      }
      if (!answer.finish) {
        answer.finish = "broken";
        answer.error = "The answer broke off. Ask again.";
      }
    } catch (error) {
      answer.finish = error.name === "AbortError" ? "stopped" : "failed";
      if (answer.finish === "failed") answer.error = error.message;
    }
    // An answer that was stopped has no figures of the server's.
    if (!answer.timings && this.firstAt !== null) answer.measured = { tokens: this.answerTokens, rate: this.rate };
    if (!answer.usage && this.progress)
      answer.usage = { prompt_tokens: this.progress.total, completion_tokens: this.answerTokens };
    this.progress = null;
  }

  take(chunk) {
    const { answer } = this;
    answer.responseId ??= chunk.id;
    if (chunk.prompt_progress) {
      this.progress = chunk.prompt_progress;
      this.prefill.note(chunk.prompt_progress.processed, chunk.prompt_progress.time_ms / 1000);
    }
    const choice = chunk.choices?.[0];
    if (choice?.delta?.reasoning_content)
      this.append("thoughts", "thoughtMarks", choice.delta.reasoning_content, chunk);
    if (choice?.delta?.content) this.append("text", "marks", choice.delta.content, chunk);
    if (choice?.finish_reason) answer.finish = choice.finish_reason;
    if (chunk.usage) answer.usage = chunk.usage;
    if (chunk.timings) answer.timings = chunk.timings;
  }

  append(field, marks, text, chunk) {
    const { answer } = this;
    this.firstAt ??= performance.now();
    answer[field] += text;
    if (chunk.token_index !== undefined) {
      addMark(answer[marks], answer[field].length, chunk.token_index);
      this.answerTokens = Math.max(this.answerTokens, chunk.token_index + 1);
    } else {
      this.answerTokens += 1;
    }
  }
}
