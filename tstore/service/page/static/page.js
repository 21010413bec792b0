// What the page does beyond its HTML: the theme, copying, values under the pointer, and what changes by itself.
// All of it is optional: without scripts every view shows the same figures as of the moment it was loaded.
"use strict";

const $ = (selector, root = document) => root.querySelector(selector);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

function announce(text) {
  const region = $("#announcement");
  if (region && region.textContent !== text) region.textContent = text;
}

// ---- the theme: the system's, unless the button has chosen

function setUpTheme() {
  const button = $("#theme");
  if (!button) return;
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const current = () => root.dataset.theme || (system.matches ? "dark" : "light");
  const show = () => { button.textContent = current() === "dark" ? "Light" : "Dark"; };
  button.addEventListener("click", () => {
    root.dataset.theme = current() === "dark" ? "light" : "dark";
    document.cookie = `tstore-theme=${root.dataset.theme}; path=/-/page/; max-age=31536000; samesite=strict`;
    show();
  });
  system.addEventListener("change", show);
  button.hidden = false;
  show();
}

// ---- copying, and the document of this view

function setUpCopying(root) {
  for (const button of all("[data-copy]", root)) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const code = $("pre", button.parentElement);
      try {
        await navigator.clipboard.writeText(code.textContent);
      } catch {  // not permitted over http to another machine
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
        return;
      }
      button.textContent = "Copied";
      announce("Copied");
    });
  }
  for (const link of all("[data-json]", root)) {
    link.addEventListener("click", async (event) => {
      event.preventDefault();
      const text = await (await fetch(link.href, { headers: { Accept: "application/json" } })).text();
      const file = URL.createObjectURL(new Blob([JSON.stringify(JSON.parse(text), null, 2)], { type: "application/json" }));
      open(file, "_blank", "noopener");
    });
  }
}

function showLocalTimes(root) {
  for (const element of all("time[datetime]", root)) {
    const time = new Date(element.dateTime);
    if (Number.isNaN(time.getTime())) continue;
    const two = (number) => String(number).padStart(2, "0");
    element.title = element.textContent;
    element.textContent =
      `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())} ` +
      `${two(time.getHours())}:${two(time.getMinutes())}:${two(time.getSeconds())}`;
  }
}

// ---- numbers, formatted as the server does

const formats = {
  number: (value) => Number(value.toPrecision(4)).toString(),
  size(value) {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let unit = 0;
    while (value >= 999.95 && unit < 4) { value /= 1000; unit += 1; }
    return unit ? `${value.toFixed(1)} ${units[unit]}` : `${value} B`;
  },
  seconds: (value) => (value < 0.95 ? `${Math.round(1000 * value)} ms` : value < 60 ? `${value.toFixed(1)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`),
};

// ---- plots: the value under the pointer, or with the arrow keys

function setUpPlots(root) {
  for (const area of all("[data-plot]", root)) {
    const points = JSON.parse(area.dataset.points);
    const labels = JSON.parse(area.dataset.labels || "null");
    if (!points.length) continue;
    const tip = $(".tip", area);
    const cross = $(".cross", area);
    const format = formats[area.dataset.format] || formats.number;
    let index = points.length - 1;
    const show = () => {
      const [x, , step, value] = points[index];
      cross.setAttribute("x1", x);
      cross.setAttribute("x2", x);
      tip.textContent = labels ? labels[index] : `${area.dataset.unit} ${step.toLocaleString("en")}: ${format(value)}`;
      tip.hidden = false;
      const half = tip.offsetWidth / 2;
      tip.style.left = `${Math.min(area.clientWidth - half, Math.max(half, (x / 1000) * area.clientWidth))}px`;
      area.classList.add("showing");
    };
    const hide = () => { tip.hidden = true; area.classList.remove("showing"); };
    area.addEventListener("pointermove", (event) => {
      const box = area.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * 1000;
      index = points.reduce((best, point, i) => (Math.abs(point[0] - x) < Math.abs(points[best][0] - x) ? i : best), 0);
      show();
    });
    area.addEventListener("pointerleave", hide);
    area.addEventListener("focus", show);
    area.addEventListener("blur", hide);
    area.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -points.length, End: points.length };
      if (!(event.key in moves)) return;
      event.preventDefault();
      index = Math.min(points.length - 1, Math.max(0, index + moves[event.key]));
      show();
      announce(tip.textContent);
    });
  }
}

// ---- details of versions, fetched when their rows are seen

const details = new Map();

async function fillDetails(row) {
  const version = row.dataset.details;
  if (!details.has(version)) {
    details.set(version, fetch(detailsUrl(row), { headers: { Accept: "application/json" } })
      .then((response) => (response.ok ? response.json() : null)));
  }
  const found = await details.get(version);
  if (found) showDetails(row, found);
}

function detailsUrl(row) { return `/-/page/version?at=${row.dataset.details}`; }

function showDetails(row, found) {
  $("[data-shared]", row).textContent = formats.size(found.shared_bytes);
  const quality = $("[data-quality]", row);
  if (!quality) return;
  const error = found.sqnr_db === null ? "exact" : `SQNR ${found.sqnr_db.toFixed(1)} dB`;
  quality.textContent = `${found.bits_per_value.toFixed(2)} bits / value, ${error}`;
}

function setUpDetails(root) {
  const seen = new IntersectionObserver((entries, observer) => {
    for (const entry of entries.filter((e) => e.isIntersecting)) {
      observer.unobserve(entry.target);
      fillDetails(entry.target);
    }
  }, { rootMargin: "200px" });
  all("tr[data-details]", root).forEach((row) => seen.observe(row));
}

const LONGEST_PRINT = 3000; // milliseconds to fetch, before printing, the details of rows that were never in view

// The browser prints the page as it is when this listener returns, so it cannot wait for `fetch`.
addEventListener("beforeprint", () => {
  const end = performance.now() + LONGEST_PRINT;
  for (const row of all("tr[data-details]")) {
    if ($("[data-shared]", row).textContent || performance.now() > end) continue;
    const request = new XMLHttpRequest();
    request.open("GET", detailsUrl(row), false);
    request.setRequestHeader("Accept", "application/json");
    try { request.send(); } catch { return; }  // the server can't be reached
    if (request.status === 200) showDetails(row, JSON.parse(request.responseText));
  }
});

// ---- rows of the tree: groups unfold in place, and the next rows are fetched when the end is seen

async function fetchRows(url) {
  const response = await fetch(url, { headers: { Accept: "text/html" } });
  if (!response.ok) throw new Error(`the server responded ${response.status}`);
  const table = new DOMParser().parseFromString(await response.text(), "text/html");
  return all("tbody tr", table);
}

function setUpTree(root) {
  const more = new IntersectionObserver(async (entries, observer) => {
    for (const entry of entries.filter((e) => e.isIntersecting)) {
      const row = entry.target;
      observer.unobserve(row);
      const rows = await fetchRows(row.dataset.more);
      row.replaceWith(...rows);
      rows.forEach(prepare);
    }
  }, { rootMargin: "600px" });
  function prepare(row) {
    if (row.dataset.more) more.observe(row);
    const twist = $(".twist", row);
    if (!twist) return;
    twist.hidden = false;
    const leaf = $(".leaf", row);
    if (leaf) leaf.remove();
    twist.addEventListener("click", async () => {
      const open = twist.getAttribute("aria-expanded") === "true";
      twist.setAttribute("aria-expanded", String(!open));
      if (!open) {
        const rows = await fetchRows(twist.dataset.rows);
        row.after(...rows);
        rows.forEach(prepare);
        announce(`${rows.length} rows`);
        return;
      }
      const level = Number(row.dataset.level);
      while (row.nextElementSibling && Number(row.nextElementSibling.dataset.level) > level) row.nextElementSibling.remove();
    });
  }
  all(".tree tbody tr", root).forEach(prepare);
}

// ---- what changes by itself

function setUpLive() {
  const region = $("[data-live]");
  if (!region) return;
  let version = region.dataset.version;
  let shown = "";
  const poll = async () => {
    let seconds = 5;
    if (!document.hidden) {
      try {
        const response = await fetch(region.dataset.live, { headers: { Accept: "text/html" } });
        if (response.status === 401) return;
        const found = $(`#${region.id}`, new DOMParser().parseFromString(await response.text(), "text/html"));
        if (response.ok && found) {
          seconds = Number(found.dataset.poll);
          const html = found.innerHTML;
          if (html !== shown) keepingFocus(region, () => region.replaceChildren(...found.childNodes));
          shown = html;
          if (found.dataset.version !== version) {
            await refresh();
            version = found.dataset.version;
          }
        }
      } catch { /* the server is away: try again */ }
    }
    setTimeout(poll, seconds * 1000);
  };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) announce(""); });
  poll();
}

// Replaces what is in an element; the focus stays on the link to the same place.
function keepingFocus(region, replace) {
  const focused = region.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  replace();
  if (focused) all("a", region).find((link) => link.getAttribute("href") === focused)?.focus();
}

async function refresh() {
  if (!$("#live")) return;
  const response = await fetch(location.href, { headers: { Accept: "text/html" } });
  if (!response.ok) return;
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  const known = new Set(all("#live tbody tr:first-child th").map((cell) => cell.textContent));
  for (const id of ["live", "summary"]) {
    const [region, found] = [$(`#${id}`), $(`#${id}`, page)];
    keepingFocus(region, () => region.replaceChildren(...found.childNodes));
  }
  const fresh = all("#live .steps tbody").filter((body) => !known.has($("th", body).textContent));
  if (known.size) fresh.forEach((body) => body.classList.add("new"));
  setUp($("#live"));
  announce(fresh.length ? `New: ${$("#summary").textContent.replace(/\s+/g, " ").trim()}` : "The run has changed");
}

// ---- a job of the server, shown until it ends

function setUpJob() {
  const job = $("#job[data-running]");
  if (!job) return;
  const poll = async () => {
    const response = await fetch(location.href, { headers: { Accept: "text/html" } });
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    const after = $("#job", page);
    if (!after) return;
    $("#job").replaceWith(document.adoptNode(after));
    showLocalTimes($("#job"));
    if (after.hasAttribute("data-running")) setTimeout(poll, 700);
    else announce($("#job .verdict") ? $("#job .verdict").textContent.replace(/\s+/g, " ").trim() : "");
  };
  setTimeout(poll, 700);
}

function setUp(root) {
  if (!root) return;
  setUpCopying(root);
  showLocalTimes(root);
  setUpPlots(root);
  setUpDetails(root);
}

setUp(document);
setUpTheme();
setUpTree(document);
setUpLive();
setUpJob();
