"""The derived secrets: stable, distinct, and silent about their source."""

import pytest

from events.secrets import link_secret, parse_secret

SECRET = "00112233445566778899aabbccddeeff" * 2


def test_link_secret_is_stable() -> None:
    assert link_secret(parse_secret(SECRET)) == link_secret(bytes.fromhex(SECRET))
    assert SECRET not in link_secret(bytes.fromhex(SECRET))


@pytest.mark.parametrize("text", ["", "xyz", "00" * 31, "canary" * 11])
def test_bad_secret_is_refused_without_quoting_it(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_secret(text)
    assert not text or text not in str(caught.value)
