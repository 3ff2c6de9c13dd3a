"""HTML by construction: every string is escaped unless it is markup that these functions made.

`tag("td", name)` is safe whatever `name` holds; only `Html` values go in as they are, and there is no other
way to make one from outside than to write it as a literal here. The page needs no network and no script
to be read; a few lines of script sort tables.
"""

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class Html(str):
    """Markup that goes into a page as it is. Everything else is text, and is escaped."""

    __slots__ = ()


_VOID = frozenset({"meta", "link", "line", "rect", "circle", "br", "path", "polyline", "polygon"})


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An HTML element. Children are escaped unless they are `Html`; None is left out. In the names of attributes a
    final underscore is dropped and other underscores become hyphens: class_, data_v, stroke_width.
    """
    parts = [
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    ]
    opened = f"<{name}{''.join(parts)}"
    if name in _VOID and not children:
        return Html(f"{opened}>" if name in ("meta", "link", "br") else f"{opened}/>")
    return Html(f"{opened}>{join(children)}</{name}>")


def join(children: Iterable[object]) -> Html:
    return Html(
        "".join(
            child if isinstance(child, Html) else html.escape(str(child), quote=False)
            for child in children
            if child is not None
        )
    )


@dataclass(frozen=True)
class Cell:
    """A cell that shows `shown` and sorts by `value`."""

    shown: object
    value: float | str
    kind: str = ""


def number(value: float | None, pattern: str = "{:.1f}", *, kind: str = "") -> Cell:
    if value is None or value != value:
        return Cell("-", "", kind)
    return Cell(pattern.format(value), value, kind)


def table(header: Sequence[str], rows: Sequence[Sequence[object]], *, caption: str, first: int = 15) -> Html:
    """A table that scrolls inside its own box. Rows beyond `first` are folded; a `Cell` sorts by its value.

    A column of numbers is aligned right, and one of dashes alone is left out.
    """
    shown = [i for i in range(len(header)) if not rows or any(not _dash(row[i]) for row in rows)]
    header, rows = [header[i] for i in shown], [[row[i] for i in shown] for row in rows]
    numeric = [bool(rows) and all(_numeric(row[i]) for row in rows) for i in range(len(header))]

    def body(part: Sequence[Sequence[object]]) -> list[Html]:
        return [tag("tr", *(_cell(cell, right) for cell, right in zip(row, numeric, strict=True))) for row in part]

    def whole(part: Sequence[Sequence[object]], title: str | None) -> Html:
        heads = [
            tag("th", text, scope="col", class_="n" if right else None)
            for text, right in zip(header, numeric, strict=True)
        ]
        shown = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *body(part)), aria_label=caption)
        box = tag("div", shown, class_="scroll", tabindex="0", role="region", aria_label=caption)
        return join([tag("p", title, class_="caption") if title else None, box])

    if len(rows) <= first + 3:  # not worth folding
        return whole(rows, caption)
    return join(
        [
            whole(rows[:first], f"{caption}: the first {first} of {len(rows)}"),
            fold(f"all {len(rows)} rows", whole(rows, None)),
        ]
    )


def _numeric(cell: object) -> bool:
    return isinstance(cell, Cell) and (not isinstance(cell.value, str) or _dash(cell))


def _dash(cell: object) -> bool:
    return isinstance(cell, Cell) and cell.shown == "-"


def _cell(cell: object, right: bool) -> Html:
    classes = "n" if right else ""
    if not isinstance(cell, Cell):
        return tag("td", cell, class_=classes or None)
    classes = f"{classes} {cell.kind}".strip()
    return tag("td", cell.shown, class_=classes or None, data_v=cell.value)


def fold(summary: object, *content: object) -> Html:
    return tag("details", tag("summary", summary), *content)


def paragraph(*text: object) -> Html:
    return tag("p", *text)


def code(text: str) -> Html:
    return tag("code", text)


def section(identity: str, title: str, *content: object) -> Html:
    return tag(
        "section", tag("h2", title, id=identity + "-title"), *content, id=identity, aria_labelledby=identity + "-title"
    )


def missing(identity: str, title: str, *text: object) -> Html:
    """A section whose record was not given: it says so in one line."""
    return section(identity, title, tag("p", *text, class_="none"))


def tiles(pairs: Sequence[tuple[str, object, str]]) -> Html:
    return tag(
        "dl",
        *(
            tag("div", tag("dt", label), tag("dd", value, class_=kind or None), class_="tile")
            for label, value, kind in pairs
        ),
        class_="tiles",
    )


def figure(drawing: Html, *caption: object) -> Html:
    return tag("figure", drawing, tag("figcaption", *caption))


def document(title: str, *body: object) -> str:
    """The whole file: one request, no network, light and dark by the reader's setting."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(STYLE)),
    )
    content = tag("body", tag("main", *body), tag("script", Html(SCRIPT)))
    return f"<!doctype html>\n{tag('html', head, content, lang='en')}\n"


STYLE = """
:root{color-scheme:light dark;--bg:#fff;--ink:#1c2127;--soft:#57606a;--line:#d5dae0;--panel:#f5f7f9;
--a:#0067a3;--b:#c14f00;--c:#007a59;--good:#1a7f37;--bad:#b42318;--open:#8a5d00;--shade:#0067a31f;
--warm:#c14f0026}
@media (prefers-color-scheme:dark){:root{--bg:#14181d;--ink:#e4e8ec;--soft:#9aa5b1;--line:#333b44;
--panel:#1c2229;--a:#5cb3ea;--b:#f09255;--c:#45c79f;--good:#4ac26b;--bad:#ff8478;--open:#e0b040;
--shade:#5cb3ea2b;--warm:#f0925533}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,sans-serif;
-webkit-text-size-adjust:100%}
main{max-width:72rem;margin:0 auto;padding:1rem}
h1{font-size:1.6rem;line-height:1.2;margin:.5rem 0;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:0 0 .5rem}h3{font-size:1rem;margin:1rem 0 .3rem;overflow-wrap:anywhere}
section{border-top:1px solid var(--line);padding:1.2rem 0}
p{margin:.4rem 0;max-width:46rem;overflow-wrap:anywhere}.none,figcaption,.caption,.soft{color:var(--soft)}
nav ul{list-style:none;padding:0;margin:.6rem 0;display:flex;flex-wrap:wrap;gap:.3rem 1.1rem}
a{color:var(--a)}code{font-family:ui-monospace,monospace;font-size:.88em;overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.6rem;margin:.8rem 0}
.tile{background:var(--panel);border:1px solid var(--line);border-radius:.4rem;padding:.5rem .7rem}
dt{color:var(--soft);font-size:.82rem}dd{margin:0;font-size:1.15rem;font-weight:600;overflow-wrap:anywhere}
.good{color:var(--good)}.bad{color:var(--bad)}.open{color:var(--open)}
.scroll{overflow-x:auto;margin:.3rem 0 .8rem;border:1px solid var(--line);border-radius:.4rem;max-width:100%}
table{border-collapse:collapse;width:100%;font-size:.86rem}
.caption{margin:1rem 0 0;font-size:.86rem}
th,td{padding:.28rem .6rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
tbody tr:last-child td{border-bottom:0}
th{color:var(--soft);font-weight:600;white-space:nowrap;background:var(--panel);cursor:pointer}
th[aria-sort=ascending]::after{content:" \\2191"}th[aria-sort=descending]::after{content:" \\2193"}
td{white-space:nowrap}.n{text-align:right;font-variant-numeric:tabular-nums}
td.wrap{white-space:normal;min-width:12rem}
td.hp{color:var(--soft)}
details{margin:.5rem 0}summary{cursor:pointer;color:var(--a)}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,21rem),1fr));gap:.4rem 1.4rem}
figure{margin:.6rem 0;max-width:36rem}figcaption{font-size:.85rem}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--ink);font:12px system-ui,sans-serif}svg .soft{fill:var(--soft)}
.axis{stroke:var(--soft)}.rule{stroke:var(--line)}
"""

SCRIPT = """
for(const t of document.querySelectorAll("table"))t.querySelectorAll("th").forEach((h,i)=>{
h.tabIndex=0;const sort=()=>{const up=h.getAttribute("aria-sort")==="descending",b=t.tBodies[0],
key=r=>{const c=r.cells[i];return c.dataset.v===undefined?c.textContent:c.dataset.v};
const rows=[...b.rows];rows.sort((p,q)=>{const x=key(p),y=key(q);if(x===""||y==="")return (x==="")-(y==="");
const d=isNaN(x)||isNaN(y)?x.localeCompare(y):x-y;return up?d:-d});
t.querySelectorAll("th").forEach(o=>o.removeAttribute("aria-sort"));
h.setAttribute("aria-sort",up?"ascending":"descending");b.append(...rows)};
h.onclick=sort;h.onkeydown=e=>{if(e.key==="Enter"){sort()}}});
"""
