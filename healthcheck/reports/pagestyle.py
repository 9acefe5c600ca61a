"""How pages look, and the one small script of ours: tables that sort at a click. Both stand in the page itself."""

from __future__ import annotations

CSS = """
:root { color-scheme: light dark; --ink: #16191d; --soft: #5b6570; --paper: #ffffff; --panel: #f6f7f9; --edge: #dde1e6;
  --grid: #e6e9ed; --bad: #b42318; --warn: #8f5a00; --good: #17693a; --info: #3d5a80; --link: #1d57a8;
  --bad-soft: #b4231814; --warn-soft: #d9920016; --info-soft: #3d5a8012;
  --c0: #2563b8; --c1: #c2570c; --c2: #15803d; --c3: #9333a8; --c4: #0e7490; --c5: #a16207; --other: #8b95a1;
  --p-data: #c2570c; --p-forward: #2563b8; --p-backward: #15803d; --p-optimizer: #9333a8; --p-other: #aab3bd;
  --h0: #eef2f7; --h1: #d3e0ef; --h2: #b1cbe5; --h3: #86b0d8; --h4: #5a91c7; --h5: #3672b0; --h6: #1f5592; --h7: #0f376b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaee; --soft: #9aa5b1; --paper: #121519; --panel: #1a1e24;
  --edge: #313843; --grid: #272d35; --bad: #ff8a7a; --warn: #e6b450; --good: #6fd08c; --info: #8fb3dc; --link: #86b4f7;
  --bad-soft: #ff8a7a1a; --warn-soft: #e6b45018; --info-soft: #8fb3dc16;
  --c0: #79aef5; --c1: #f59e5b; --c2: #6fd08c; --c3: #d69be6; --c4: #67c7dd; --c5: #d9b64e; --other: #78828e;
  --p-data: #f59e5b; --p-forward: #79aef5; --p-backward: #6fd08c; --p-optimizer: #d69be6; --p-other: #55606c;
  --h0: #1d242d; --h1: #20344a; --h2: #234666; --h3: #275b86; --h4: #3275aa; --h5: #4a93cb; --h6: #7bb6e4; --h7: #c2e1fb; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 1.2rem 1.2rem 4rem; }
h1 { font-size: 1.55rem; line-height: 1.25; margin: .4rem 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.12rem; margin: 2.4rem 0 .8rem; padding-bottom: .25rem; border-bottom: 1px solid var(--edge); }
h3 { font-size: 1rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
p { margin: .2rem 0; overflow-wrap: anywhere; }
a { color: var(--link); }
small, dt, .numbers, .said { color: var(--soft); font-size: .85rem; font-weight: normal; }
header .said { display: block; font-size: 1rem; color: var(--ink); }
.badge { display: inline-block; padding: .05em .55em; border: 1px solid currentColor; border-radius: 4px; font-size: .72rem;
  font-weight: 650; white-space: nowrap; vertical-align: middle; letter-spacing: .02em; }
h1 .badge { font-size: .9rem; }
.badge.failed, .badge.stopped, .badge.script-failed, .badge.internal-error, .error .sev { color: var(--bad); }
.badge.warned, .badge.cannot-tell, .warning .sev { color: var(--warn); }
.badge.ok { color: var(--good); }
.badge.not-judged, .badge.interrupted, .badge.does-not-apply, .badge.partly-judged, .info .sev { color: var(--soft); }
nav { display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: .6rem 0 0; font-size: .9rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .8rem 0; }
dd { margin: 0; overflow-wrap: anywhere; }
dl.facts { display: flex; flex-wrap: wrap; gap: .5rem 1.6rem; }
dl.facts div { min-width: 0; } dl.facts dt { font-size: .78rem; } dl.facts dd { font-weight: 550; }
article { background: var(--panel); border: 1px solid var(--edge); border-left: 4px solid var(--soft); border-radius: 6px;
  padding: .8rem 1rem; margin: .9rem 0; }
article.error { border-left-color: var(--bad); } article.warning { border-left-color: var(--warn); }
article ul { margin: .3rem 0; padding-left: 1.2rem; overflow-wrap: anywhere; font-size: .92rem; }
article:target { outline: 2px solid var(--link); }
article figure { background: none; border: 0; padding: .7rem 0 0; }
.try { background: var(--info-soft); border-radius: 4px; padding: .3rem .6rem; margin-top: .4rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); gap: 1rem; }
.charts .tall { grid-column: 1 / -1; }
figure { margin: 0; background: var(--panel); border: 1px solid var(--edge); border-radius: 6px; padding: .7rem .8rem; min-width: 0; }
figcaption .said { display: block; }
figure + figure, figure + .charts { margin-top: 1rem; } .charts figure { margin-top: 0; }
.key { font-size: .82rem; margin-left: .7rem; white-space: nowrap; }
.key::before { content: ""; display: inline-block; width: 1.1em; height: 0; border-top: 3px solid var(--k, var(--c0)); margin-right: .35em;
  vertical-align: middle; }
.key.c1 { --k: var(--c1); } .key.c2 { --k: var(--c2); } .key.c3 { --k: var(--c3); } .key.c4 { --k: var(--c4); }
.key.c5 { --k: var(--c5); } .key.normal, .key.other { --k: var(--other); } .key.normal::before { border-top-style: dashed; }
.plot { padding: .55rem 0 1.25rem 4.2rem; }
.area { position: relative; height: 8.5rem; border-left: 1px solid var(--edge); border-bottom: 1px solid var(--edge); }
.tall .area { height: 15rem; } .area.low { height: 5rem; }
svg { display: block; width: 100%; height: 100%; overflow: hidden; }
svg path { fill: none; vector-effect: non-scaling-stroke; }
.grid { stroke: var(--grid); stroke-width: 1; }
.line { stroke: var(--c0); stroke-width: 1.6; stroke-linejoin: round; stroke-linecap: round; }
.line.c1 { stroke: var(--c1); } .line.c2 { stroke: var(--c2); } .line.c3 { stroke: var(--c3); } .line.c4 { stroke: var(--c4); }
.line.c5 { stroke: var(--c5); } .line.other { stroke: var(--other); }
.line.normal { stroke: var(--soft); stroke-dasharray: 5 4; stroke-width: 1.3; }
.line.faint { opacity: .3; stroke-width: 1; }
.limit { stroke: var(--bad); stroke-width: 1.3; stroke-dasharray: 2 3; }
.beyond { fill: var(--bad-soft); }
.span { fill: var(--info-soft); } .span.error { fill: var(--bad-soft); } .span.warning { fill: var(--warn-soft); }
.mark { stroke: var(--info); stroke-width: 1.3; } .mark.error { stroke: var(--bad); } .mark.warning { stroke: var(--warn); }
.broken { stroke: var(--bad); stroke-width: 3; }
.h { fill: transparent; } .h:hover { fill: var(--ink); fill-opacity: .09; }
.yt, .xt, .xn { position: absolute; color: var(--soft); font-size: .74rem; line-height: 1; white-space: nowrap; pointer-events: none; }
.yt { right: calc(100% + .4rem); transform: translateY(-50%); }
.xt { top: calc(100% + .35rem); transform: translateX(-50%); } .xt.edge { transform: translateX(-100%); } .xt.first { transform: none; }
.xn { display: none; }
.live-chart { display: none; } .plot.live { padding: .4rem 0 0; } .plot.live .area { display: none; } .plot.live .live-chart { display: block; }
.tag { position: absolute; font-size: .74rem; line-height: 1.35; padding: 0 .3rem; border-radius: 3px; background: var(--panel);
  color: var(--soft); white-space: nowrap; pointer-events: none; }
.tag.lim { right: .2rem; transform: translateY(-50%); color: var(--bad); }
.tag.at { top: .15rem; color: var(--ink); font-weight: 600; margin-left: .3rem; } .tag.left { transform: translateX(-100%); margin-left: -.3rem; }
.tag.nf { bottom: 1.6rem; color: #fff; background: #b42318; font-weight: 650; margin-left: .3rem; }
.strip { background: var(--panel); border: 1px solid var(--edge); border-radius: 6px; padding: .6rem .8rem 1.1rem; margin: 1rem 0; }
.lane { display: grid; grid-template-columns: 7.5rem 1fr; align-items: center; }
.ln { font-size: .82rem; color: var(--soft); white-space: nowrap; overflow: hidden; text-overflow: ellipsis; padding-right: .4rem; }
.lb { position: relative; height: 1.5rem; border-bottom: 1px solid var(--grid); } .lb.ax { height: .2rem; border: 0; }
.ev { position: absolute; top: .25rem; height: 1rem; min-width: 3px; border-radius: 2px; background: var(--c0); }
a.ev { background: var(--info-soft); border-left: 3px solid var(--info); min-width: 8px; }
a.ev span { position: absolute; left: -9999px; }
a.ev.error { background: var(--bad-soft); border-color: var(--bad); } a.ev.warning { background: var(--warn-soft); border-color: var(--warn); }
i.ev { width: 3px; margin-left: -1px; } i.ev.checkpoints { background: var(--good); } i.ev.restarts { background: var(--c3); width: 5px; }
i.ev.evaluations { background: var(--c1); top: .45rem; height: .6rem; }
.heatmap { display: grid; grid-template-columns: minmax(5rem, 11rem) 1fr; gap: .5rem; height: calc(var(--rows) * 1.02rem); margin-top: .5rem; }
.hns { display: grid; grid-auto-rows: 1fr; min-width: 0; }
.hn { font-size: .72rem; line-height: 1.02rem; color: var(--soft); overflow: hidden; white-space: nowrap; text-overflow: ellipsis; direction: rtl; text-align: right; unicode-bidi: plaintext; }
.hn.bad { color: var(--bad); font-weight: 700; } .hn.bad::before { content: "\\25B8 "; }
.h0 { fill: var(--h0); } .h1 { fill: var(--h1); } .h2 { fill: var(--h2); } .h3 { fill: var(--h3); } .h4 { fill: var(--h4); }
.h5 { fill: var(--h5); } .h6 { fill: var(--h6); } .h7 { fill: var(--h7); } .hx { fill: var(--bad); }
.scale { float: right; font-size: .76rem; color: var(--soft); } .scale i { display: inline-block; width: .9em; height: .8em; background: var(--b); vertical-align: -.1em; }
.scale .h0 { --b: var(--h0); } .scale .h1 { --b: var(--h1); } .scale .h2 { --b: var(--h2); } .scale .h3 { --b: var(--h3); }
.scale .h4 { --b: var(--h4); } .scale .h5 { --b: var(--h5); } .scale .h6 { --b: var(--h6); } .scale .h7 { --b: var(--h7); }
.scale .hx { --b: var(--bad); margin-left: .6em; }
.bar { display: flex; height: 1.7rem; border-radius: 4px; overflow: hidden; margin-top: .5rem; }
.part { min-width: 1px; color: #fff; font-size: .76rem; line-height: 1.7rem; text-align: center; overflow: hidden; }
@media (prefers-color-scheme: dark) { .part { color: #10151b; } }
.p-data { background: var(--p-data); fill: var(--p-data); } .p-forward { background: var(--p-forward); fill: var(--p-forward); }
.p-backward { background: var(--p-backward); fill: var(--p-backward); } .p-optimizer { background: var(--p-optimizer); fill: var(--p-optimizer); }
.p-other { background: var(--p-other); fill: var(--p-other); }
.wide { overflow-x: auto; }
details { margin-top: .8rem; }
summary { cursor: pointer; color: var(--soft); font-weight: 600; padding: .25rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .86rem; }
th, td { text-align: left; padding: .28rem .9rem .28rem 0; border-bottom: 1px solid var(--edge); vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid var(--link); }
th[aria-sort=ascending] button::after { content: " \\2191"; } th[aria-sort=descending] button::after { content: " \\2193"; }
td:nth-child(1) { white-space: nowrap; }
.n { text-align: right; }
@media (max-width: 40rem) { main { padding: .8rem .7rem 3rem; } .plot { padding-left: 3.4rem; } .xt.few { display: none; }
  td:nth-child(1) { white-space: normal; } .lane { grid-template-columns: 7rem 1fr; } .ln { font-size: .74rem; } .heatmap { grid-template-columns: 5.5rem 1fr; }
  .tall .area { height: 12rem; } .key { margin-left: .3rem; } .scale { float: none; display: block; } }
@media print { article, figure, tr { break-inside: avoid; } nav, .h { display: none; } main { max-width: none; padding: 0; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""

SORT = """
for (const head of document.querySelectorAll("table.sortable th")) {
  const button = document.createElement("button");
  button.append(...head.childNodes);
  head.append(button);
  button.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending", place = head.cellIndex;
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...head.closest("table").tBodies[0].rows];
    const key = (row) => row.cells[place].dataset.key ?? row.cells[place].textContent.trim();
    rows.sort((a, b) => key(a).localeCompare(key(b), "en", { numeric: true }) * (down ? -1 : 1));
    head.closest("table").tBodies[0].append(...rows);
  });
}
"""
