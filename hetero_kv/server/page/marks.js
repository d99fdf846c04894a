// Which token each part of a text comes from: {ends, tokens}, text up to `ends[i]` from token `tokens[i]`.

/** Marks of an empty text. */
export const noMarks = () => ({ ends: [], tokens: [] });

/** Notes that a text, now `length` characters long, ends with token `token`. */
export function addMark(marks, length, token) {
  if (marks.tokens.at(-1) === token) marks.ends[marks.ends.length - 1] = length;
  else {
    marks.ends.push(length);
    marks.tokens.push(token);
  }
}

/** The number of the mark that has character `at`, or -1 where none has. */
export function markAt(marks, at) {
  let low = 0;
  let high = marks.ends.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (marks.ends[middle] > at) high = middle;
    else low = middle + 1;
  }
  return low < marks.ends.length ? low : -1;
}
