// Makes DOM nodes. Foreign text only ever becomes text nodes and attribute values.

/**
 * A new element.
 *
 * `attributes` are set as such; `on` is {event: listener}; true sets one without value; null and false set none.
 * `children` are nodes and texts; null is left out.
 */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (value === true) {
      element.setAttribute(name, "");
    } else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, String(value));
    }
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/** An icon of index.html, which says nothing to screen readers. */
export function icon(name) {
  const SVG = "http://www.w3.org/2000/svg";
  const drawing = document.createElementNS(SVG, "svg");
  drawing.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#icon-${name}`);
  drawing.append(use);
  return drawing;
}

/** A button with an icon, named `label`. */
export function iconButton(name, label, onClick, attributes = {}) {
  return make(
    "button",
    { type: "button", class: "icon-button", "aria-label": label, title: label, on: { click: onClick }, ...attributes },
    icon(name),
  );
}

/** The element with an id. */
export const byId = (id) => document.getElementById(id);
