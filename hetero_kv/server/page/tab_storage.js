// What a tab remembers until it is closed. Browsers may forbid it: then it lasts as long as the page.

const own = new Map();

/** The text under a name, or null. */
export function remembered(name) {
  try {
    return sessionStorage.getItem(name);
  } catch {
    return own.get(name) ?? null;
  }
}

/** Remembers a text. */
export function remember(name, text) {
  own.set(name, text);
  try {
    sessionStorage.setItem(name, text);
  } catch {
    // It is remembered here.
  }
}
