"use strict";
// Headings become buttons that sort their table; rows without a value stay at the end.
for (const table of document.querySelectorAll("table[data-sorts]")) {
  const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  const value = (row, i) => row.cells[i].dataset.value ?? row.cells[i].textContent;
  const compare = (a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
  const sort = (head, i) => {
    const other = { ascending: "descending", descending: "ascending" };
    const order = other[head.getAttribute("aria-sort")] ?? head.dataset.first;
    heads.forEach((each) => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", order);
    const body = table.tBodies[0];
    const [known, empty] = [[], []];
    for (const row of body.rows) (value(row, i) === "" ? empty : known).push(row);
    known.sort((a, b) => compare(value(a, i), value(b, i)) * (order === "ascending" ? 1 : -1));
    body.append(...known, ...empty);
  };
  heads.forEach((head, i) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(head, i));
    head.append(button);
  });
}
// On a phone the page begins with all sections but the first one folded; a link opens its section.
if (matchMedia("(max-width: 40rem)").matches)
  for (const section of [...document.querySelectorAll("details.section")].slice(1)) section.open = false;
const reveal = () => {
  const section = location.hash && document.getElementById(location.hash.slice(1));
  if (section instanceof HTMLDetailsElement) {
    section.open = true;
    section.scrollIntoView();
  }
};
addEventListener("hashchange", reveal);
for (const link of document.querySelectorAll("nav a")) link.addEventListener("click", () => setTimeout(reveal));
reveal();
// The values of points and bars are shown at once, where the browser's own tooltip would wait, and on touch never come.
const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
document.body.append(tip);
for (const title of document.querySelectorAll(".hit > title")) {
  const mark = title.parentNode;
  mark.dataset.tip = title.textContent;
  title.remove();
}
addEventListener("pointerover", (event) => {
  const text = event.target.dataset?.tip;
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const place = event.target.getBoundingClientRect();
  const left = Math.min(place.right + 6, document.documentElement.clientWidth - tip.offsetWidth - 4);
  tip.style.left = `${Math.max(4, left) + scrollX}px`;
  tip.style.top = `${Math.max(place.top - tip.offsetHeight - 6, 4) + scrollY}px`;
});
// On paper nothing stays folded.
addEventListener("beforeprint", () => {
  for (const folded of document.querySelectorAll("details:not([open])")) {
    folded.open = true;
    folded.dataset.folded = "";
  }
});
addEventListener("afterprint", () => {
  for (const folded of document.querySelectorAll("details[data-folded]")) {
    folded.open = false;
    delete folded.dataset.folded;
  }
});
