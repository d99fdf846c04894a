// Shows Markdown as DOM nodes. Foreign text only becomes text nodes; links lead to the web and mail alone.

import { copyButton } from "./clipboard.js";
import { make } from "./dom.js";
import { blocksOf } from "./markdown_blocks.js";
import { spansOf } from "./markdown_inline.js";
import { SourceText } from "./source_text.js";

/**
 * Shows `text` in `element`; nodes of blocks that have not changed since the last time stay.
 *
 * `textNode` makes the node of a SourceText.
 */
export function show(element, text, textNode) {
  const blocks = blocksOf(SourceText.at(0, text));
  const shown = element.shownBlocks ?? [];
  const keys = blocks.map((block) => JSON.stringify(block));
  let same = 0;
  while (same < keys.length && shown[same] === keys[same]) same += 1;
  while (element.childNodes.length > same) element.lastChild.remove();
  element.append(...blocks.slice(same).map((block) => blockNode(block, textNode)));
  element.shownBlocks = keys;
}

function blockNode(block, textNode) {
  switch (block.kind) {
    case "heading":
      // The page has its own h1 and h2.
      return make(
        `h${Math.min(6, block.level + 2)}`,
        { class: `level-${block.level}` },
        spanNodes(block.text, textNode),
      );
    case "paragraph":
      return make("p", {}, spanNodes(block.text, textNode));
    case "code":
      return codeNode(block, textNode);
    case "quote":
      return make(
        "blockquote",
        {},
        block.blocks.map((each) => blockNode(each, textNode)),
      );
    case "list":
      return make(
        block.isOrdered ? "ol" : "ul",
        { start: block.isOrdered && block.start !== 1 ? block.start : null },
        block.items.map((item) => make("li", {}, itemNodes(item, textNode))),
      );
    case "table":
      return tableNode(block, textNode);
    default:
      return make("hr");
  }
}

/** The nodes of a list's item; a lone paragraph needs no element of its own. */
function itemNodes(blocks, textNode) {
  const [first, ...others] = blocks;
  if (first?.kind !== "paragraph" || others.some((each) => each.kind === "paragraph")) {
    return blocks.map((each) => blockNode(each, textNode));
  }
  return [...spanNodes(first.text, textNode), ...others.map((each) => blockNode(each, textNode))];
}

function codeNode({ language, text }, textNode) {
  return make(
    "figure",
    { class: "code" },
    make(
      "figcaption",
      {},
      make("span", {}, language || "code"),
      copyButton(() => text.text, "Copy the code"),
    ),
    make("pre", { tabindex: 0 }, make("code", {}, textNode(text))),
  );
}

function tableNode({ aligned, head, rows }, textNode) {
  const row = (tag, cells) =>
    make(
      "tr",
      {},
      cells.map((cell, number) => make(tag, { class: `to-${aligned[number]}` }, spanNodes(cell, textNode))),
    );
  return make(
    "div",
    { class: "table", tabindex: 0, role: "group", "aria-label": "Table" },
    make(
      "table",
      {},
      make("thead", {}, row("th", head)),
      make(
        "tbody",
        {},
        rows.map((cells) => row("td", cells)),
      ),
    ),
  );
}

const TAGS = { strong: "strong", emphasis: "em", deleted: "del", plain: "span" };

function spanNodes(source, textNode) {
  return spansOf(source).map((span) => spanNode(span, textNode));
}

function spanNode(span, textNode) {
  const inside = () => span.spans.map((each) => spanNode(each, textNode));
  switch (span.kind) {
    case "text":
      return textNode(span.text);
    case "code":
      return make("code", {}, textNode(span.text));
    case "break":
      return make("br");
    case "link":
      return make("a", { href: span.target, target: "_blank", rel: "noopener noreferrer" }, inside());
    default:
      return make(TAGS[span.kind], {}, inside());
  }
}
