"""The style sheet of the HTML page."""

from __future__ import annotations

CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --paper: #ffffff; --panel: #f5f6f8; --rule: #d5d9de;
  --bad: #b42318; --warn: #8a5a00; --good: #1a6b35; --line: #2457a6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #9aa4af; --paper: #14171b; --panel: #1d2127;
  --rule: #353b43; --bad: #ff8b7e; --warn: #e3b341; --good: #6fce8a; --line: #83b0f5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 1.25rem 1rem 4rem; }
h1 { font-size: 1.5rem; margin: 1rem 0 .4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; padding-bottom: .2rem; border-bottom: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 0 0 .3rem; }
p { margin: .2rem 0; overflow-wrap: anywhere; }
small, dt, .numbers, .axis, figcaption span { color: var(--soft); font-size: .87rem; font-weight: normal; }
.said { font-family: ui-monospace, monospace; }
.badge { display: inline-block; padding: 0 .5em; border: 1px solid currentColor; border-radius: 3px; font-size: .75rem;
  font-weight: 600; white-space: nowrap; vertical-align: middle; }
.badge.failed, .error .sev { color: var(--bad); }
.badge.warned, .warning .sev { color: var(--warn); }
.badge.ok { color: var(--good); }
.badge.not-judged, .info .sev { color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .8rem 0; }
dd { margin: 0; overflow-wrap: anywhere; }
article { background: var(--panel); border-left: 4px solid var(--soft); padding: .7rem .9rem; margin: .6rem 0; }
article.error { border-color: var(--bad); }
article.warning { border-color: var(--warn); }
article ul { margin: .3rem 0; padding-left: 1.2rem; overflow-wrap: anywhere; }
article:target { outline: 2px solid var(--line); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--panel); padding: .6rem .7rem; }
figcaption span { display: block; }
svg { display: block; width: 100%; height: 6rem; margin-top: .3rem; }
svg path { fill: none; vector-effect: non-scaling-stroke; }
.line { stroke: var(--line); stroke-width: 1.4; stroke-linejoin: round; }
.mark { stroke: var(--bad); stroke-dasharray: 3 3; }
.broken { stroke: var(--bad); stroke-width: 2; }
.axis { display: flex; justify-content: space-between; margin: 0; }
.wide { overflow-x: auto; }
details { margin-top: .8rem; }
summary { cursor: pointer; color: var(--soft); font-weight: 600; padding: .2rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .87rem; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
td:nth-child(1) { white-space: nowrap; }
.n { text-align: right; }
a { color: var(--line); }
@media print { article, figure { break-inside: avoid; } }
"""
