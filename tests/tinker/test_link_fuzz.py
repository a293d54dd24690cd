"""Links to files, changed in any way: the same file or none."""

import base64
import json
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tinker.test_http_fuzz import answer_to, names
from tests.tinker.test_rest_downloads import exported, links

quick = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def link(server) -> tuple[str, str, bytes]:
    """(token, file name, the file)."""
    path = links(server, exported(server))["state.json"]
    token, name = path.rsplit("/", 2)[1:]
    status, content = answer_to(server, "GET", f"/api/v1/downloads/{token}/{name}")
    assert status == 200
    return token, name, content


def follow(server, token: str, name: str) -> tuple[int, bytes]:
    return answer_to(server, "GET", f"/api/v1/downloads/{quote_from_bytes(token.encode())}/{name}")


def encoded(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def test_a_link_with_characters_replaced_is_the_same_or_refused(server, link):
    token, name, content = link

    @quick
    @given(st.integers(0, len(token) - 1), st.text("AZaz09-_.=%", max_size=3), st.integers(0, 3))
    def same_or_refused(at: int, inserted: str, removed: int) -> None:
        changed = token[:at] + inserted + token[at + removed :]
        status, answer = follow(server, changed, name)
        assert status in (403, 404) or (status, answer) == (200, content)

    same_or_refused()


def test_a_link_with_another_name_is_refused(server, link):
    token, name, _ = link

    @quick
    @given(names)
    def refused(other: bytes) -> None:
        shown = quote_from_bytes(other, "")
        if shown != name:
            assert answer_to(server, "GET", f"/api/v1/downloads/{token}/{shown}")[0] in (307, 403, 404)

    refused()


@pytest.mark.parametrize("algorithm", ["none", "None", "HS256", "RS256", "", None, 1])
@pytest.mark.parametrize("member", ["state.json", "../../server.db", "/etc/passwd", None])
def test_a_link_signed_by_nobody_is_refused(server, link, algorithm, member):
    token, name, _ = link
    payload = token.split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    forged = f"{encoded({'alg': algorithm, 'typ': 'JWT'})}.{encoded({**claims, 'member': member})}."
    for signature in ("", "AAAA", token.rsplit(".")[-1]):
        assert follow(server, forged + signature, name)[0] == 403
