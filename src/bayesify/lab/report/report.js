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
