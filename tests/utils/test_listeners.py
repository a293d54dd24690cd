import socket

from skyrl.backends.engines.http_engine import belongs_to_this_user
from tests.users import listener_of_another_user, needs_root, own_listener


def test_an_own_listener_is_recognized():
    with own_listener() as port, socket.create_connection(("127.0.0.1", port)):
        assert belongs_to_this_user(port)


def test_a_port_without_a_listener_is_not_ours():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert not belongs_to_this_user(closed.getsockname()[1])


@needs_root
def test_a_listener_of_another_user_is_recognized():
    with listener_of_another_user() as (port, _), socket.create_connection(("127.0.0.1", port)):
        assert not belongs_to_this_user(port)
