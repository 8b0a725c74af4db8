"""Write docs/images/page.png: the page in a real browser, answering a question from a real store.

python docs/screenshot.py [STORE] [--model MODEL] [--prompt TEXT --completion TEXT] [--dark]

The store defaults to the demo's (`make demo` first). Needs chromium, chromium-driver and selenium (extra dev).
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parent.parent
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync "
    "--disable-dev-shm-usage --hide-scrollbars"
)


def capture(url: str, request: dict[str, object], target: Path, *, width: int, height: int, dark: bool) -> None:
    """Open the page with a question in its address, point at the first result, and save what a reader sees."""
    from selenium import webdriver
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for flag in [*FLAGS.split(), f"--window-size={width},{height}"]:
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver") or "chromedriver"))
    try:
        driver.get(url + "/docs")
        driver.execute_script("localStorage.setItem('eogp-theme', arguments[0])", "dark" if dark else "light")
        driver.get(f"{url}/#{quote(json.dumps(request))}")
        WebDriverWait(driver, 60).until(lambda d: d.find_elements("css selector", ".hit"))
        driver.execute_script("document.querySelector('.side.pro .hit').focus()")
        time.sleep(0.5)  # colours fade in
        tall = int(driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]["height"])
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": width, "height": min(tall, height), "deviceScaleFactor": 1.5, "mobile": False})
        time.sleep(0.3)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(base64.b64decode(driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]))
    finally:
        driver.quit()


def main() -> None:
    """Serve, capture, stop."""
    parser = argparse.ArgumentParser(description="Write docs/images/page.png from a real store.")
    parser.add_argument("store", type=Path, nargs="?", default=ROOT / "demo" / "store")
    parser.add_argument("--model")
    parser.add_argument("--prompt", default="The capital of Mongolia is")
    parser.add_argument("--completion", default=" Ulaanbaatar")
    parser.add_argument("--score", default="influence")
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1440)
    parser.add_argument("--height", type=int, default=1500)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "page.png")
    asked = parser.parse_args()
    command = [sys.executable, "-c", "from engine.cli import main; main()", "serve", str(asked.store), "--port", "0", "--log-level", "error"]
    command += ["--model", asked.model] if asked.model else []
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        line = server.stdout.readline() if server.stdout else ""
        if "http://" not in line:
            raise SystemExit(server.wait(10) or 1)
        url = "http://" + line.split("http://")[1].split()[0]
        request: dict[str, object] = {"queries": [{"prompt": asked.prompt, "completion": asked.completion}], "top_k": asked.top_k, "score": asked.score}
        capture(url, request, asked.out, width=asked.width, height=asked.height, dark=asked.dark)
        print(f"wrote {asked.out}")
    finally:
        server.terminate()
        server.wait(20)


if __name__ == "__main__":
    main()
