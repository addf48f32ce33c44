// Makes what scrolls focusable, and shows only the rows of the list of checks that contain all words of the filter.
document.addEventListener("DOMContentLoaded", () => {
  // Wide tables and code scroll sideways: with the keyboard, too.
  for (const region of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) region.tabIndex = 0;
  const box = document.querySelector(".check-filter");
  if (!box) return;
  box.hidden = false;
  box.querySelector("input").addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of document.querySelectorAll("article tbody tr")) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
});
