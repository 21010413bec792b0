"""What runs for others: programs that read and write over HTTP, and people with a browser.

`statistics/`: what the values of arrays are like, and how two versions differ. `server/`: a store over HTTP.
`page/`: the page for browsers, which the server shows.
"""
