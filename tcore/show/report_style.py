"""Style and script of the report page."""

STYLE = """
:root { --paper: #fbfaf8; --card: #fff; --ink: #22252b; --faint: #666b75; --rule: #e3e0da; --ours: #eef4fb;
  --link: #0b5fa5; --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b0558a; --c4: #9a7008; --c5: #2a8fc9;
  --c6: #7f4fc9; --c7: #666; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --card: #1e2126; --ink: #e6e6e3;
  --faint: #a0a5ae; --rule: #33373e; --ours: #1d2c3d; --link: #7cc0f5; --c0: #5db4ee; --c1: #ff9a57;
  --c2: #3fd0a2; --c3: #e79ac5; --c4: #e0b94a; --c5: #8fd0f7; --c6: #b79af0; --c7: #aaa; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 20px 64px; max-width: 1180px; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 26px; overflow-wrap: anywhere; }
header p { margin: 2px 0 12px; color: var(--faint); overflow-wrap: anywhere; }
h2 { margin: 36px 0 10px; font-size: 19px; }
nav { display: flex; flex-wrap: wrap; gap: 4px 16px; padding: 8px 0; border-block: 1px solid var(--rule); }
a { color: var(--link); text-decoration: none; }
a:hover { text-decoration: underline; }
.scroll { overflow-x: auto; margin: 0 0 16px; background: var(--card); border: 1px solid var(--rule);
  border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { padding: 10px 12px 4px; text-align: left; color: var(--faint); }
th, td { padding: 6px 12px; border-top: 1px solid var(--rule); text-align: left; vertical-align: top; }
td { overflow-wrap: break-word; max-width: 28em; }
td:first-child { min-width: 9em; }
thead th { border-top: 0; white-space: nowrap; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
th[aria-sort=ascending] button::after { content: " \\25b2"; font-size: 10px; }
th[aria-sort=descending] button::after { content: " \\25bc"; font-size: 10px; }
td.number { text-align: right; white-space: nowrap; }
th.number { text-align: right; }
small { color: var(--faint); }
tr.ours { background: var(--ours); font-weight: 600; }
details { margin: 0 0 16px; }
summary { cursor: pointer; color: var(--link); margin-bottom: 8px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 270px), 1fr)); gap: 12px; }
figure { margin: 0; padding: 10px 12px; background: var(--card); border: 1px solid var(--rule);
  border-radius: 8px; }
figcaption { font-weight: 600; margin-bottom: 4px; overflow-wrap: anywhere; }
figcaption small { display: flex; flex-wrap: wrap; gap: 2px 12px; font-weight: 400; }
.picture { margin-bottom: 16px; }
.picture img { display: block; max-width: 100%; height: auto; margin: 0 auto; background: #fff;
  border-radius: 4px; }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 11px; fill: var(--faint); }
svg .grid { stroke: var(--rule); }
polyline { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke: var(--c); }
circle { fill: var(--c); }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
.c4 { --c: var(--c4); } .c5 { --c: var(--c5); } .c6 { --c: var(--c6); } .c7 { --c: var(--c7); }
.key { display: inline-block; width: 18px; border-top: 3px solid var(--c); margin-right: 6px;
  vertical-align: middle; }
.key.dashed { border-top-style: dashed; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; padding: 0; margin: 0 0 10px; list-style: none; }
@media (max-width: 560px) { body { padding: 16px 12px 48px; font-size: 14px; } th, td { padding: 6px 8px; } }
@media print { nav, summary { display: none; } }
"""

SCRIPT = """
const number = (cell) => parseFloat(cell.textContent.replace(/,/g, ""));
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  table.querySelectorAll("thead th").forEach((head, column) => {
    if (body.querySelector(`td.number:nth-child(${column + 1})`)) head.classList.add("number");
    head.querySelector("button").addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [a.cells[column], b.cells[column]];
        const [p, q] = [number(x), number(y)];
        if (isNaN(p) !== isNaN(q)) return isNaN(p) ? 1 : -1;
        const order = isNaN(p) ? x.textContent.localeCompare(y.textContent) : p - q;
        return up ? order : -order;
      });
      body.append(...rows);
    });
  });
}
"""
