// The page's colours: as the system has them, or as chosen. A classic script, for it runs before the first paint.
"use strict";

(() => {
  const NAME = "hetero-kv.theme";
  const root = document.documentElement;

  const stored = () => {
    try {
      return localStorage.getItem(NAME) ?? "auto";
    } catch {
      return "auto";
    }
  };
  const apply = (theme) => {
    root.dataset.theme = ["light", "dark"].includes(theme) ? theme : "auto";
  };

  apply(stored());
  addEventListener("DOMContentLoaded", () => {
    for (const choice of document.querySelectorAll("#theme input")) {
      choice.checked = choice.value === root.dataset.theme;
      choice.addEventListener("change", () => {
        apply(choice.value);
        try {
          localStorage.setItem(NAME, choice.value);
        } catch {
          // The choice holds until the page is closed.
        }
      });
    }
  });
})();
