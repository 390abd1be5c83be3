"""The style sheet of a plan's page: system fonts, one column on a phone and two where there is room, light and dark."""

STYLE = """
:root{--bg:#fff;--fg:#1b1f24;--dim:#57606a;--rule:#d0d7de;--grid:#e6eaee;--card:#f6f8fa;--good:#116329;--bad:#a40e26;
--warn:#7d4e00;--c0:#0969da;--c1:#bc4c00;--c2:#8250df;--c3:#1a7f37;--c4:#bf3989;--c5:#9a6700;--c6:#6e7781;--c7:#24292f}
@media (prefers-color-scheme:dark){:root{--bg:#0d1117;--fg:#e6edf3;--dim:#9aa4af;--rule:#30363d;--grid:#232a32;
--card:#161b22;--good:#56d364;--bad:#ff7b72;--warn:#e3b341;--c0:#58a6ff;--c1:#f0883e;--c2:#bc8cff;--c3:#3fb950;
--c4:#f778ba;--c5:#d29922;--c6:#8b949e;--c7:#c9d1d9}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1120px;margin:0 auto;padding:16px}
h1{font-size:1.5rem;margin:.2em 0;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:1.6em 0 .5em}
section{min-width:0}
.load,.small,figcaption,small,caption{color:var(--dim)}
.small,figcaption,caption{font-size:.85rem}
.note{border-left:3px solid var(--warn);padding:2px 10px;background:var(--card)}
.good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(160px,1fr));gap:8px;margin:12px 0}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:6px;padding:8px 10px;display:flex;
flex-direction:column}
.tile b{font-size:1.25rem}.tile span{font-size:.85rem}.tile small{font-size:.75rem}
figure{margin:0;max-width:640px}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr));gap:0 32px}
.line-up{white-space:nowrap}
svg{display:block;width:100%;height:auto}
.scroll{overflow-x:auto;margin:8px 0}
.ranked table{min-width:1000px}
table{border-collapse:collapse;font-size:.85rem;width:100%}
caption{text-align:left;padding:4px 0;position:sticky;left:0;max-width:calc(100vw - 32px)}
th,td{text-align:left;vertical-align:top;padding:4px 10px 4px 0;border-bottom:1px solid var(--grid);min-width:3.5em}
th{border-bottom:1px solid var(--rule);white-space:nowrap}
details{font-size:.85rem}
details summary{cursor:pointer;padding:6px 0;color:var(--dim)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 14px;padding:0;margin:6px 0}
.key{display:inline-block;width:12px;height:12px;border-radius:2px;margin-right:5px;vertical-align:-1px;
background:currentColor}
.s0{color:var(--c0)}.s1{color:var(--c1)}.s2{color:var(--c2)}.s3{color:var(--c3)}
.s4{color:var(--c4)}.s5{color:var(--c5)}.s6{color:var(--c6)}.s7{color:var(--c7)}
svg text{fill:var(--fg);font-size:12.5px;font-family:inherit}
svg .tick{fill:var(--dim)}
svg .grid{stroke:var(--grid);stroke-width:1}
svg .frame{fill:none;stroke:var(--rule)}
svg .line{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round}
svg .dashed{stroke-dasharray:5 4;stroke-width:1.5}
svg .band{fill:currentColor;opacity:.16}
svg .mark{fill:currentColor;stroke:var(--bg);stroke-width:1}
svg .part{fill:currentColor;stroke:var(--bg);stroke-width:1}
svg .whisker{stroke:currentColor;stroke-width:1.5}
svg .limit{stroke:var(--fg);stroke-dasharray:3 3}
"""
