// Shows only the rows of the list of checks that contain all words of the filter.
document.addEventListener("DOMContentLoaded", () => {
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
