// What the page does beside showing: theme, copying, the table of ranks, printing. All of it can be read without.
"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const byId = (id) => document.getElementById(id);

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

  // navigator.clipboard does not exist on pages of some browsers that were opened from a file.
  const select = (element) => {
    const range = document.createRange();
    range.selectNodeContents(element);
    const selection = getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
  };
  const copy = async (element) => {
    try {
      await navigator.clipboard.writeText(element.textContent);
      return "Copied";
    } catch {
      select(element);
      return document.execCommand("copy") ? "Copied" : "Press Ctrl+C";
    }
  };
  for (const button of all(".copy")) {
    const name = button.getAttribute("aria-label");
    button.hidden = false;
    button.addEventListener("click", async () => {
      const result = await copy(button.parentElement.querySelector(".to-copy"));
      button.textContent = result;
      button.setAttribute("aria-label", result);
      byId("copied").textContent = result;
      setTimeout(() => {
        button.textContent = "Copy";
        button.setAttribute("aria-label", name);
        byId("copied").textContent = "";
      }, 2000);
    });
  }

  // Charts are complete without scripts. Here one view, or one quantity, is shown at a time.
  const plot = byId("timeline-chart");
  const drawing = plot?.querySelector(".stretch");
  const fromFocus = Number(drawing?.dataset.zoom ?? 1);
  let zoom = 1;
  // Positions in the drawing are shares of its width: a wider drawing is a closer look, and its frame scrolls.
  const stretch = (times, share) => {
    zoom = Math.min(Math.max(times, 1), Math.max(64, 4 * fromFocus));
    drawing.style.width = `${100 * zoom}%`;
    plot.scrollLeft = share * plot.scrollWidth - plot.clientWidth / 2;
  };
  const view = (name) => {
    for (const button of all("button[data-view]")) {
      button.setAttribute("aria-pressed", String(button.dataset.view === name));
    }
    for (const ticks of all(".ticks")) ticks.classList.toggle("unused", ticks.dataset.view !== name);
    stretch(name === "focus" ? fromFocus : 1, 1);
  };
  if (plot) {
    byId("timeline").querySelector(".views").hidden = false;
    for (const button of all("button[data-view]")) button.addEventListener("click", () => view(button.dataset.view));
    for (const button of all("[data-by]")) {
      const middle = () => (plot.scrollLeft + plot.clientWidth / 2) / plot.scrollWidth;
      button.addEventListener("click", () => stretch(zoom * Number(button.dataset.by), middle()));
    }
    if (fromFocus > 1) view("focus");
  }
  for (const chooser of all(".chooser")) {
    const charts = [...byId(chooser.dataset.of).children];
    const show = () => charts.forEach((chart, index) => (chart.hidden = index !== chooser.selectedIndex));
    chooser.parentElement.hidden = charts.length < 2;
    chooser.addEventListener("change", show);
    show();
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
    if (fromFocus > 1) view("all");
    folded = all("details:not([open])");
    for (const details of folded) details.open = true;
  });
  addEventListener("afterprint", () => {
    for (const details of folded) details.open = false;
    folded = [];
  });

  const checks = byId("check-table");
  const checkFilter = byId("check-filter");
  const checkRows = [...checks.tBodies[0].rows].map((row) => ({
    row,
    text: row.textContent.toLowerCase(),
    family: row.cells[1].textContent,
    state: row.cells[2].textContent,
  }));
  const isChosen = (id, value) => byId(id).value === "" || byId(id).value === value;
  const narrowChecks = () => {
    const words = checkFilter.value.toLowerCase().split(/[\s,]+/);
    let shown = 0;
    for (const { row, text, family, state } of checkRows) {
      const fits = isChosen("check-family", family) && isChosen("check-state", state);
      row.hidden = !(fits && words.every((word) => text.includes(word)));
      shown += !row.hidden;
    }
    const count = shown === checkRows.length ? shown : `${shown} of ${checkRows.length}`;
    byId("check-count").textContent = `${count} ${checkRows.length === 1 ? "check" : "checks"}`;
  };
  checkFilter.closest(".tools").hidden = false;
  checkFilter.addEventListener("input", narrowChecks);
  for (const id of ["check-family", "check-state"]) byId(id).addEventListener("change", narrowChecks);

  const table = byId("rank-table");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => ({
    row,
    ranks: row.cells[0].textContent.split(",").map((part) => part.split("-").map(Number)),
    text: `${row.textContent} ${row.dataset.hosts ?? ""}`.toLowerCase(),
    named: row.classList.contains("named"),
  }));
  const filter = byId("rank-filter");
  const named = byId("rank-named");
  const count = byId("rank-count");
  const everything = count.textContent;
  // Of many ranks, those in the same state share a row.
  const isFolded = rows.some(({ row }) => /[,-]/.test(row.cells[0].textContent));
  const unit = isFolded ? "rows" : rows.length === 1 ? "rank" : "ranks";
  filter.closest(".tools").hidden = false;

  // "3" and "0-7" are ranks, anything else is text that a row must hold.
  const matcher = (word) => {
    const span = /^(\d+)(?:-(\d+))?$/.exec(word);
    if (!span) return ({ text }) => text.includes(word);
    const low = Number(span[1]);
    const high = span[2] === undefined ? low : Number(span[2]);
    return ({ ranks }) => ranks.some(([first, last = first]) => low <= last && first <= high);
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
    count.textContent = shown === rows.length ? everything : `${shown} of ${rows.length} ${unit}`;
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
