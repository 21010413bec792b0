"""The proxy that the environment names for a server: HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY."""

from __future__ import annotations

from urllib.request import getproxies, proxy_bypass

from yarl import URL

from tstore.errors import InvalidArgument

__all__ = ["environment_proxy"]


def environment_proxy(url: URL) -> URL | None:
    """Return the proxy for a server, by the rules of urllib, None if there is none.

    Raise `InvalidArgument`, which shows no password, if it can't be used.
    """
    proxies = getproxies()
    text = proxies.get(url.scheme) or proxies.get("all")
    if not text or proxy_bypass(f"{url.host}:{url.port}"):
        return None
    name = f"{url.scheme.upper()}_PROXY" if proxies.get(url.scheme) else "ALL_PROXY"
    try:
        proxy = URL(text if "://" in text else f"http://{text}")
        usable = proxy.scheme in ("http", "https") and bool(proxy.host) and proxy.port is not None
    except ValueError:
        usable = False
    if not usable:
        raise InvalidArgument(
            f"the proxy of {name} can't be used for {url.origin()}; expected http://host:port, or the name of the "
            "server in NO_PROXY"
        )
    return proxy
