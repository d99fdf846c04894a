// Numbers and times as people read them.

const INTEGER = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** 12,345 */
export const count = (number) => INTEGER.format(number);

/** "8K", "128K", "1M", of tokens */
export function contextSize(tokens) {
  if (tokens < 1024) return count(tokens);
  return tokens < 1024 ** 2 ? `${Math.round(tokens / 1024)}K` : `${Math.round((10 * tokens) / 1024 ** 2) / 10}M`;
}

/** "1 token", "2 tokens" */
export const counted = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** "850 B", "12 kB", "3.4 MB" */
export function bytes(number) {
  if (number < 1000) return `${number} B`;
  if (number < 1e6) return `${Math.round(number / 1e3)} kB`;
  return `${(number / 1e6).toFixed(1)} MB`;
}

/** "0.4 s", "3 s", "12 s", "3 min 20 s", "2 h 5 min" */
export function duration(seconds) {
  if (seconds < 9.95 && !Number.isInteger(seconds)) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** "0.3 %", "12 %", of a share between 0 and 1 */
export function percent(share) {
  const points = 100 * share;
  if (points > 0 && points < 0.1) return "<\u00a00.1\u00a0%";
  return `${points >= 9.95 || points === 0 ? Math.round(points) : points.toFixed(1)}\u00a0%`;
}

/** "34 tokens/s" */
export const rate = (perSecond) => `${perSecond >= 9.95 ? Math.round(perSecond) : perSecond.toFixed(1)} tokens/s`;
