"""A page about a store for browsers: `tstore view STORE`, or `tstore serve STORE`.

1. `site`: the requests below `/-/page/`, who may make them, and the headers of every response. `sessions`:
   browsers that have signed in. `turns`: how many views are computed at once.
2. `views`: what a view is; `navigation`: the list of views. Each has a module: `run` (steps, metrics, retention),
   with `status` (is the run OK?) and `hosts` under way, from the `timeline` of steps; `tree` (groups and arrays);
   `tensor` (statistics of an array); `compare` (two versions); `health`, with the job `verification`.
3. `rendering`: templates and their text. `plots`: the geometry of plots, which templates draw as SVG;
   `distributions`: the geometry of histograms and heat maps.
4. `opening`: the store behind the server; the page's work runs on an event loop apart from the server's.
   `results`: what several requests need.

To add a view, write a module with a function from a `Query` (the store, the parameters in the URL) to a document
of plain JSON values, and a template with the same name below `templates/` that extends `page.html` and finds the
document as `data`. Then add a `View` to the list in `navigation`. The view has the URL `/-/page/<name>?…`, where
programs get the document itself with `Accept: application/json`. The document has the keys "command" and
"python": how to get the same from a shell and in Python, which the page offers to copy. Text from a store is shown
with the filter `text`, which makes control characters visible. No template has scripts or styles inline, because
browsers refuse them here: `static/page.css` and `static/page.js` have both, and lengths that depend on data are
attributes of SVG.

Plots are drawn here as SVG, because the first view must take less than 300 kB and no inline script or style. The
libraries that ship their browser part in their package take more: Bokeh 3.9 1.27 MB (351 kB compressed) and Plotly
7.1 4.8 MB (1.47 MB), and both contain `new Function`. Those that draw SVG on a server style it inline (Matplotlib,
Pygal), or need a wheel of 33 MB (Vega-Altair with vl-convert), and neither the colours of a theme nor the labels
for screen readers would be ours.
"""

from __future__ import annotations

from tstore.service.page.site import Site

__all__ = ["Site"]
