// Text that remembers where in the answer each of its characters stands.

/** A text, and for each of its characters the position in the whole answer. */
export class SourceText {
  constructor(text, positions) {
    this.text = text;
    this.positions = positions;
  }

  /** A text that begins at `start` of the answer. */
  static at(start, text) {
    return new SourceText(
      text,
      Array.from({ length: text.length }, (_, index) => start + index),
    );
  }

  /** Lines, joined by line ends. */
  static joined(lines) {
    const texts = [];
    const positions = [];
    for (const [number, line] of lines.entries()) {
      if (number > 0) {
        texts.push("\n");
        positions.push(positions.length ? positions.at(-1) + 1 : 0);
      }
      texts.push(line.text);
      for (const position of line.positions) positions.push(position);
    }
    return new SourceText(texts.join(""), positions);
  }

  /** The lines of the text, without their ends. */
  lines() {
    const found = [];
    let start = 0;
    for (const line of this.text.split("\n")) {
      found.push(this.slice(start, start + line.length));
      start += line.length + 1;
    }
    return found;
  }

  /** The characters from `start` to `end`. */
  slice(start, end = this.text.length) {
    return new SourceText(this.text.slice(start, end), this.positions.slice(start, end));
  }

  /** What tells it from others of the same answer. */
  toJSON() {
    return [this.positions[0], this.text];
  }

  /** The text without blanks around it. */
  trimmed() {
    const start = this.text.length - this.text.trimStart().length;
    return this.slice(start, Math.max(start, this.text.trimEnd().length));
  }
}
