"""Check the built site as a reader meets it: `make docs`, then `python docs/tools/check_site.py`.

Links and anchors within the site lead somewhere. In headless Chromium, at the width of a desktop and of a phone, in
the light and the dark theme: contrast of text (WCAG AA), alt texts, headings, landmarks, names of links and buttons,
tables with headings, and pages that are wider than the screen. Where no Chromium is installed only the links are
checked, and it says so. `--pictures FOLDER` writes screenshots of some pages.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
SCRIPT = Path(__file__).with_suffix(".js")
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]
SHOWN = ("index.html", "start/first_batch.html", "batch.html", "reference/tdc.viz.html", "notebooks/ensembles.html")
LIMIT = 900  # seconds
SKIPPED = ("genindex.html", "search.html")  # which the theme makes


class Links(HTMLParser):
    """Targets of links and pictures, and names that links may lead to."""

    def __init__(self, text: str):
        super().__init__()
        self.targets: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(value)
            elif name in ("id", "name") and value:
                self.ids.add(value)


def broken_links(site: Path) -> list[str]:
    """Links within the site that lead to no file or no anchor."""
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    problems = []
    for path, links in pages.items():
        for target in dict.fromkeys(links.targets):
            address, anchor = urldefrag(target)
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            place = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            lost = anchor and place in pages and unquote(anchor) not in pages[place].ids
            if not place.exists() or lost:
                problems.append(f"{path.relative_to(site)}: {target} leads nowhere")
    return problems


class Handler(SimpleHTTPRequestHandler):
    """Serves the site, the script that checks it, and takes what the script found."""

    found: list[str] | None = None
    done = threading.Event()

    def do_GET(self) -> None:
        root = Path(self.directory)
        pages = [p.relative_to(root).as_posix() for p in sorted(root.rglob("*.html")) if p.name not in SKIPPED]
        extra = {
            "/check.html": ("text/html", f"<!doctype html><body><script>{SCRIPT.read_text(encoding='utf-8')}</script>"),
            "/pages.json": ("application/json", json.dumps([f"/{page}" for page in pages])),
        }
        if self.path not in extra:
            return super().do_GET()
        kind, text = extra[self.path]
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self) -> None:
        Handler.found = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        Handler.done.set()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of each request."""


def looked_at(browser: str, site: Path, pictures: Path | None) -> list[str]:
    """Problems that the script finds in a browser, whose process ends with this function."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [browser, *OPTIONS, f"--user-data-dir={profile}"]
        for page in SHOWN if pictures else ():
            assert pictures is not None
            pictures.mkdir(parents=True, exist_ok=True)
            name = page.removesuffix(".html").replace("/", "-")
            for width in (1280, 500):  # a window of a browser is no narrower
                file = pictures / f"{name}-{width}.png"
                options = [f"--window-size={width},1400", f"--screenshot={file}", f"{base}/{page}"]
                subprocess.run([*command, *options], capture_output=True, timeout=120, check=False)
        process = subprocess.Popen(
            [*command, "--window-size=1400,1000", "--remote-debugging-port=0", f"{base}/check.html"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        ended = Handler.done.wait(LIMIT)
        process.kill()
        process.wait()
    server.shutdown()
    if not ended or Handler.found is None:
        return [f"the browser has not ended within {LIMIT} seconds"]
    return Handler.found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--site", type=Path, default=SITE)
    parser.add_argument("--pictures", type=Path)
    arguments = parser.parse_args()
    if not (arguments.site / "index.html").exists():
        sys.exit(f"no site in {arguments.site}: make docs")
    problems = broken_links(arguments.site)
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        print(f"== SKIPPED: all but links, since there is none of {', '.join(NAMES)}")
    else:
        problems += looked_at(browser, arguments.site, arguments.pictures)
    print("\n".join([*problems, f"{len(problems)} problems"]))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
