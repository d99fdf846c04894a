// How fast something goes, and when it will be done.

// Seconds: long enough to even out steps, short enough to follow a prefill that slows down as the context grows.
const WINDOW_S = 15;

/** The pace of a count that grows. */
export class Pace {
  constructor() {
    this.samples = [];
  }

  /** Notes that the count was `done` after `seconds`. */
  note(done, seconds) {
    this.samples.push([seconds, done]);
    while (this.samples.length > 2 && seconds - this.samples[1][0] > WINDOW_S) this.samples.shift();
  }

  /** Units per second over the last seconds, or null while it is unknown. */
  get rate() {
    if (this.samples.length < 2) return null;
    const [[firstTime, first], [lastTime, last]] = [this.samples[0], this.samples.at(-1)];
    return lastTime - firstTime >= 1 && last > first ? (last - first) / (lastTime - firstTime) : null;
  }

  /** Seconds until the count is `total`, or null while it is unknown. */
  secondsTo(total) {
    return this.rate === null ? null : Math.max(0, total - this.samples.at(-1)[1]) / this.rate;
  }
}
