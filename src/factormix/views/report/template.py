"""The frame and the style sheet of a report's page: nothing in them is fetched from anywhere."""

__all__ = ["PAGE", "STYLE"]

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<main>
<header><h1>{title}</h1>{subtitle}</header>
{body}
</main>
</body>
</html>
"""

STYLE = """:root {
  --page: #fbfbfa; --ink: #1d2126; --soft: #5c6670; --line: #dde1e5; --panel: #f0f2f4;
  --accent: #2f6db3; --good: #1d7a46; --fair: #96650a; --bad: #b3372f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #15181c; --ink: #e4e7ea; --soft: #9ba5af; --line: #333a42; --panel: #20252b;
    --accent: #7fb2ea; --good: #24794a; --fair: #8f6210; --bad: #b8463d;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--page); color: var(--ink); overflow-wrap: break-word;
  font: 1.0625rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}
main {
  max-width: 66rem; margin: 0 auto;
  padding: clamp(1.25rem, 4vw, 3.5rem) clamp(1rem, 4vw, 3rem);
}
header { border-bottom: 1px solid var(--line); margin-bottom: 1.75rem; padding-bottom: 1rem; }
h1, h2, h3 { line-height: 1.22; letter-spacing: -0.012em; text-wrap: balance; }
h1 { font-size: clamp(1.7rem, 4.5vw, 2.4rem); margin: 0; }
h2 { font-size: 1.45rem; margin: 2.75rem 0 0.75rem; }
h3 { font-size: 1.13rem; margin: 2rem 0 0.5rem; }
p, ul, .note { max-width: 44rem; margin: 0.75rem 0; }
.subtitle { color: var(--soft); font-size: 1.1rem; margin: 0.5rem 0 0; }
a { color: var(--accent); text-underline-offset: 0.15em; }
code, pre { font: 0.9em/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
p code, li code, td code, figcaption code {
  background: var(--panel); border-radius: 4px; padding: 0.1em 0.3em;
}
pre {
  background: var(--panel); border-radius: 8px; padding: 0.9rem 1.1rem; overflow-x: auto;
  font-size: 0.85rem;
}
pre code { font-size: inherit; }
nav { background: var(--panel); border-radius: 10px; padding: 0.9rem 1.2rem; margin: 1.5rem 0; }
nav ul { list-style: none; margin: 0; padding: 0; columns: 17rem; max-width: none; }
nav li { break-inside: avoid; padding: 0.1rem 0; }
nav .level3 { padding-left: 1.1rem; font-size: 0.94em; }
nav a { text-decoration: none; }
nav a:hover { text-decoration: underline; }
.note {
  background: var(--panel); border-left: 4px solid var(--accent);
  border-radius: 0 8px 8px 0; padding: 0.1rem 1.1rem;
}
.figures {
  display: flex; flex-wrap: wrap; gap: 1.5rem; margin: 1.5rem 0; align-items: flex-start;
}
figure { margin: 0; max-width: 100%; width: calc(var(--width) + 1.5rem); }
.figures figure:not(:only-child) {
  flex: 1 1 20rem; width: auto; max-width: min(100%, calc(var(--width) + 1.5rem));
}
.card {
  background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 0.75rem;
}
.card img { display: block; width: 100%; height: auto; }
figcaption {
  color: var(--soft); font-size: 0.92rem; line-height: 1.45; margin-top: 0.5rem;
  max-width: 44rem;
}
.table { overflow-x: auto; margin: 1.25rem 0; }
table {
  border-collapse: collapse; font-size: 0.95rem; line-height: 1.4;
  font-variant-numeric: tabular-nums;
}
caption { text-align: left; color: var(--soft); font-size: 0.92rem; padding-bottom: 0.5rem; }
th, td {
  padding: 0.42rem 0.7rem 0.42rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top;
}
th:not(:first-child), td:not(:first-child) { padding-left: 0.7rem; }
th { color: var(--soft); font-weight: 600; border-bottom-width: 2px; vertical-align: bottom; }
.l { text-align: left; } .c { text-align: center; } .r { text-align: right; }
td.r { white-space: nowrap; }
.verdicts {
  list-style: none; padding: 0; max-width: 56rem; margin: 1.25rem 0;
  border-top: 1px solid var(--line);
}
.verdicts li {
  display: grid; grid-template-columns: 11rem 1fr minmax(9rem, 34%); gap: 0.3rem 1.2rem;
  padding: 0.75rem 0; border-bottom: 1px solid var(--line); align-items: start;
}
.badge {
  justify-self: start; color: #fff; font-size: 0.82rem; font-weight: 600; line-height: 1.2;
  padding: 0.3rem 0.7rem; border-radius: 99px; white-space: nowrap;
}
.good { background: var(--good); }
.fair { background: var(--fair); }
.bad { background: var(--bad); }
.number { color: var(--soft); font-size: 0.95rem; font-variant-numeric: tabular-nums; }
@media (max-width: 44rem) {
  .verdicts li { grid-template-columns: 1fr; }
  .card { padding: 0.4rem; border-radius: 8px; }
}
@media print {
  :root { --page: #fff; --ink: #000; }
  figure, tr, .verdicts li { break-inside: avoid; }
}"""
