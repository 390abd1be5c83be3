"""What a report's page has beyond the common style: badges, struck-out figures, commands to copy."""

STYLE = """
.badge{display:inline-block;border:1px solid currentColor;border-radius:10px;padding:0 9px;font-size:.85rem;
white-space:nowrap;font-weight:600}
s{color:var(--dim);text-decoration-thickness:2px;text-decoration-color:var(--bad)}
.gates{display:flex;flex-wrap:wrap;gap:6px 10px;margin:8px 0}
pre{background:var(--card);border:1px solid var(--rule);border-radius:6px;padding:8px 10px;font-size:.8rem;
white-space:pre-wrap;overflow-wrap:anywhere;margin:4px 0 10px;user-select:all}
td{font-variant-numeric:tabular-nums}
.wide table{min-width:860px}
.lean td{white-space:nowrap}
.name{white-space:normal;overflow-wrap:anywhere;display:inline-block;min-width:9em;max-width:16em}
.missing li{margin:2px 0}
ul{padding-left:1.2em}
.same{color:var(--c0)}
h3{font-size:1rem;margin:1.2em 0 .3em}
p,li,td,th,summary{overflow-wrap:break-word}
.word{overflow-wrap:anywhere}
@media print{.scroll{overflow:visible}details{display:block}}
"""
