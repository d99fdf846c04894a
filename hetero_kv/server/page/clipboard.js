// Copies text.

import { icon, iconButton } from "./dom.js";
import { say } from "./announcer.js";

/** A button that copies what `text()` gives. */
export function copyButton(text, label) {
  const button = iconButton("copy", label, async () => {
    const isCopied = await copy(text());
    say(isCopied ? "Copied." : "The browser does not let this page copy.");
    if (!isCopied) return;
    button.replaceChildren(icon("check"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Browsers give the clipboard to https and this machine alone; this older way they give to all.
    const field = document.createElement("textarea");
    field.value = text;
    field.className = "hidden";
    document.body.append(field);
    field.select();
    const isCopied = document.execCommand("copy");
    field.remove();
    return isCopied;
  }
}
