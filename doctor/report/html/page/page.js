// What the page does beside showing: theme, copying, the table of ranks, printing. All of it can be read without.
"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const byId = (id) => document.getElementById(id);
  const repaint = () => document.dispatchEvent(new Event("repaint"));

  const remember = (theme) => {
    try {
      localStorage.setItem("rankdoctor-theme", theme);
    } catch {
      // A page from a file may not be allowed to remember anything.
    }
  };
  const remembered = () => {
    try {
      return localStorage.getItem("rankdoctor-theme");
    } catch {
      return null;
    }
  };

  const preference = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : preference.matches);
  const themeButton = byId("theme");
  const nameTheme = () => {
    themeButton.textContent = isDark() ? "Light" : "Dark";
    themeButton.setAttribute("aria-label", `Change to ${isDark() ? "light" : "dark"} colours`);
    repaint();
  };
  const known = remembered();
  if (known === "dark" || known === "light") root.dataset.theme = known;
  themeButton.hidden = false;
  themeButton.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remember(root.dataset.theme);
    nameTheme();
  });
  preference.addEventListener("change", nameTheme);
  nameTheme();

  const copyBySelection = (element) => {
    const range = document.createRange();
    range.selectNodeContents(element);
    const selection = getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
    return document.execCommand("copy");
  };
  for (const button of all(".copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
      } catch {
        copyBySelection(code);
      }
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 2000);
    });
  }

  const openTarget = () => {
    const target = location.hash.length > 1 && byId(decodeURIComponent(location.hash.slice(1)));
    if (target && target.tagName === "DETAILS") target.open = true;
  };
  addEventListener("hashchange", openTarget);
  for (const link of all('a[href^="#playbook-"]')) {
    link.addEventListener("click", () => (byId(link.hash.slice(1)).open = true));
  }
  openTarget();

  let folded = [];
  addEventListener("beforeprint", () => {
    folded = all("details:not([open])");
    for (const details of folded) details.open = true;
    document.dispatchEvent(new Event("paper"));
  });
  addEventListener("afterprint", () => {
    for (const details of folded) details.open = false;
    folded = [];
    document.dispatchEvent(new Event("screen"));
  });

  const table = byId("rank-table");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => ({
    row,
    rank: Number(row.cells[0].dataset.order),
    text: row.textContent.toLowerCase(),
    named: row.classList.contains("named"),
  }));
  const filter = byId("rank-filter");
  const named = byId("rank-named");
  const count = byId("rank-count");
  filter.closest(".tools").hidden = false;

  // "3" and "0-7" are ranks, anything else is text that a row must hold.
  const matcher = (word) => {
    const span = /^(\d+)(?:-(\d+))?$/.exec(word);
    if (!span) return ({ text }) => text.includes(word);
    const low = Number(span[1]);
    const high = span[2] === undefined ? low : Number(span[2]);
    return ({ rank }) => low <= rank && rank <= high;
  };
  const narrow = () => {
    const words = filter.value
      .toLowerCase()
      .replace(/\branks?\s+(?=\d)/g, "")
      .split(/[\s,]+/);
    const tests = words.filter(Boolean).map(matcher);
    let shown = 0;
    for (const entry of rows) {
      const fits = (!named.checked || entry.named) && tests.every((test) => test(entry));
      entry.row.hidden = !fits;
      shown += fits;
    }
    const ranks = rows.length === 1 ? "rank" : "ranks";
    count.textContent = shown === rows.length ? `${shown} ${ranks}` : `${shown} of ${rows.length} ${ranks}`;
  };
  filter.addEventListener("input", narrow);
  named.addEventListener("change", narrow);

  const valueOf = (row, column) => {
    const cell = row.cells[column];
    const order = cell.dataset.order ?? cell.textContent.trim();
    return order !== "" && Number.isFinite(Number(order)) ? Number(order) : order;
  };
  const compare = (one, other) => {
    if (typeof one === "number" && typeof other === "number") return one - other;
    return String(one).localeCompare(String(other), "en", { numeric: true });
  };
  const sortBy = (heading, column) => {
    const down = heading.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const sign = down ? -1 : 1;
    const keyed = rows.map((entry) => [valueOf(entry.row, column), entry]);
    // What is empty stands last, whichever way.
    keyed.sort(([one], [other]) => (one === "") - (other === "") || sign * compare(one, other));
    body.append(...keyed.map(([, entry]) => entry.row));
  };
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => sortBy(heading, column));
  });
})();
