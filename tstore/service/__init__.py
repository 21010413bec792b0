"""Services for other programs over HTTP, and for people with a browser.

`statistics/`: statistics of arrays, and the differences of two versions. `server/`: a store over HTTP.
`page/`: the page for browsers, which the server shows.
"""
