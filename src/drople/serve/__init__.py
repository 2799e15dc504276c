"""`drople serve`: a web page on which a run is asked, questioned, and taught a little more.

`workbench` holds what the page does, without a page; `page` lays it out with gradio; `server` opens it to
this machine alone. Needs the extra `drople[serve]`.
"""

from drople.serve.server import build, running, serve

__all__ = ["build", "running", "serve"]
