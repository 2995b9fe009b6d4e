"""`anchorleg fields`, and the page that shows what it prints."""

from pathlib import Path

from typer.testing import CliRunner

from cli.main import app
from gateway.endpoints import Endpoint
from gateway.fields import FIELDS

PAGE = Path(__file__).parents[3] / "docs" / "openai.md"


def test_the_page_on_what_the_lane_serves_shows_the_table_as_it_is() -> None:
    printed = CliRunner().invoke(app, ["fields", "--markdown"])
    assert printed.exit_code == 0
    assert printed.stdout in PAGE.read_text(), "docs/openai.md is older than gateway/fields.py: anchorleg fields --markdown"


def test_every_field_of_both_endpoints_is_shown() -> None:
    shown = CliRunner().invoke(app, ["fields"], env={"COLUMNS": "200"}).stdout
    assert all(name in shown for endpoint in Endpoint for name in FIELDS[endpoint])
