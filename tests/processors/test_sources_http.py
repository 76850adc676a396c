"""http(s) URLs as sources of media, from servers on this machine; no test uses the network."""

import contextlib
import http.server
import socket
import ssl
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from mmdeploy_llm_processors import remote
from mmdeploy_llm_processors.remote import fetch_media
from mmdeploy_llm_processors.remote import http as remote_http
from mmdeploy_llm_processors.remote.addresses import check_addresses
from mmdeploy_llm_processors.remote.url import is_listed, parse

from mmdeploy_llm.errors import (
    MediaError,
    MediaLimitError,
    MediaTimeoutError,
    UnsupportedMediaError,
)
from mmdeploy_llm.hooks import MediaLimits, MediaRef, PluginManager

HERE = {"allow_urls": True, "allowed_domains": ("127.0.0.1",), "allow_private_addresses": True}
PUBLIC = "93.184.216.34"


def fetch(uri, **limits):
    return fetch_media(MediaRef(kind="image", uri=uri), replace(MediaLimits(), **limits))


def respond(handler, status=200, body=b"content", **headers):
    handler.send_response(status)
    headers = {"Content_Length": str(len(body)), **headers}
    for name, value in headers.items():
        if value is not None:
            handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


@pytest.fixture
def serve():
    """Returns a function from routes (path -> function of the handler) to a server with .url, .port
    and .requests."""
    servers = []

    def start(routes, context=None):
        requests = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                requests.append((self.path, dict(self.headers)))
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    routes[self.path.partition("?")[0]](self)  # the client may disconnect early

            def log_message(self, *args):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.handle_error = lambda *args: None
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        port = server.server_address[1]
        return SimpleNamespace(port=port, url=f"http://127.0.0.1:{port}", requests=requests)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def pauses(monkeypatch):
    """Records the requested back-off pauses without waiting."""
    slept = []
    monkeypatch.setattr(remote_http.time, "sleep", slept.append)
    return slept


@pytest.fixture
def names(monkeypatch):
    """Returns a dict of host name -> answers of successive lookups; IP addresses resolve to
    themselves."""
    answers, real = {}, socket.getaddrinfo

    def lookup(host, port, *args, **kwargs):
        if host not in answers:
            return real(host, port, *args, flags=socket.AI_NUMERICHOST)
        found = answers[host].pop(0) if len(answers[host]) > 1 else answers[host][0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in found]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    return answers


def test_a_url_gives_its_bytes(serve):
    server = serve({"/a/photo.png": respond})
    assert fetch(f"{server.url}/a/photo.png?size=3", **HERE) == b"content"
    (path, headers) = server.requests[0]
    assert path == "/a/photo.png?size=3"
    assert headers["Host"] == f"127.0.0.1:{server.port}"
    assert headers["Accept-Encoding"] == "identity"
    assert not {"Authorization", "Cookie"} & set(headers)


def test_chunked_answers_and_odd_characters(serve):
    def chunked(handler):
        handler.protocol_version = "HTTP/1.1"
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")

    server = serve({"/b%C3%BC%20x.png": chunked})
    assert fetch(f"{server.url}/bü x.png", **HERE) == b"abcde"


def test_urls_are_off_until_an_option_allows_them(serve):
    server = serve({"/x.png": respond})
    for uri in (f"{server.url}/x.png", "HTTPS://host/x.png", " https://host/x.png"):
        with pytest.raises(UnsupportedMediaError, match="allow_media_urls=True") as caught:
            fetch(uri)
        assert "allowed_media_domains" in str(caught.value)
    assert server.requests == []


def test_other_forms_are_left_to_others():
    for uri in ("photo.png", "data:,x", "file:///x.png", "store://cat", "C:\\x.png"):
        assert fetch(uri, **HERE) is None


def test_only_listed_hosts(names):
    names["other.org"] = [[PUBLIC]]
    with pytest.raises(MediaError, match=r"other.org is not in allowed_media_domains \(a.org, b"):
        fetch("http://other.org/x.png", allow_urls=True, allowed_domains=("a.org", "b.org"))


@pytest.mark.parametrize(
    ("host", "is_in"),
    [
        ("example.com", True),
        ("a.img.org", True),
        ("b.a.img.org", True),
        ("img.org", False),
        ("evilimg.org", False),
        (".img.org", False),
        ("example.com.evil.org", False),
        ("www.example.com", False),
    ],
)
def test_names_match_exactly_or_below_a_star(host, is_in):
    assert is_listed(host, ("example.com", "*.img.org")) is is_in


NOT_PUBLIC = {
    "this machine": ("127.0.0.1", "0.0.0.0", "0.1.2.3", "::", "::1", "::7f00:1"),
    "private": ("10.1.2.3", "172.16.0.1", "192.168.1.1", "fc00::1", "100.64.0.1"),
    "metadata": ("169.254.169.254", "100.100.100.200", "168.63.129.16", "fd00:ec2::254"),
    "link-local": ("fe80::1", "fe80::1%eth0", "fec0::1"),
    "several machines": ("224.0.0.1", "255.255.255.255", "ff02::1"),
    "reserved": ("192.0.0.192", "240.0.0.1", "198.18.0.1", "203.0.113.5", "2001:db8::1"),
    "IPv4 in IPv6": ("::ffff:127.0.0.1", "::ffff:169.254.169.254"),
    "6to4 and Teredo": ("2002:7f00:1::", "2002:a9fe:a9fe::1", "2001:0:7f00:1::1"),
    "NAT64": ("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1"),
}


@pytest.mark.parametrize("kind", NOT_PUBLIC)
def test_addresses_that_are_not_public(kind):
    for address in NOT_PUBLIC[kind]:
        with pytest.raises(MediaError) as caught:
            check_addresses("host", ["93.184.216.34", address], allow_private=False)
        assert address not in str(caught.value)


@pytest.mark.parametrize("address", [PUBLIC, "2606:4700::1111", "64:ff9b::5db8:d822"])
def test_public_addresses(address):
    check_addresses("host", [address], allow_private=False)


def test_private_addresses_on_request_but_never_metadata():
    for address in ("127.0.0.1", "10.1.2.3", "192.168.0.9", "::1", "fd12::1"):
        check_addresses("host", [address], allow_private=True)
    metadata = ("169.254.169.254", "fd00:ec2::254", "100.100.100.200", "::ffff:169.254.169.254")
    for address in (*metadata, "0.0.0.0", "224.0.0.1", "fe80::1", "168.63.129.16"):
        with pytest.raises(MediaError):
            check_addresses("host", [address], allow_private=True)


def test_private_hosts_are_refused_without_the_option(serve, names):
    server = serve({"/x.png": respond})
    names["inside.example.com"] = [["127.0.0.1"]]
    for host in ("127.0.0.1", "inside.example.com", "2130706433"):
        for domains in ((), (host,)):
            with pytest.raises(MediaError, match=r"public|known|connection"):
                fetch(
                    f"http://{host}:{server.port}/x.png",
                    allow_urls=True,
                    allowed_domains=domains,
                )
    with pytest.raises(MediaError, match="not a public one"):  # the option is for listed hosts only
        fetch(f"{server.url}/x.png", allow_urls=True, allow_private_addresses=True)
    assert server.requests == []


def test_one_refused_address_refuses_the_host(serve, names):
    server = serve({"/x.png": respond})
    names["mixed.org"] = [[PUBLIC, "127.0.0.1"]]
    with pytest.raises(MediaError, match="not a public one"):
        fetch(f"http://mixed.org:{server.port}/x.png", allow_urls=True)


def test_the_connection_goes_to_the_checked_address(serve, names, monkeypatch):
    """DNS rebinding: a second lookup would return this machine, but there is none."""
    server = serve({"/x.png": respond})
    names["rebind.org"] = [[PUBLIC], ["127.0.0.1"]]
    connected, real = [], socket.create_connection

    def connect(address, *args, **kwargs):
        connected.append(address)
        return real(("127.0.0.1", address[1]), *args, **kwargs)  # in place of the public machine

    monkeypatch.setattr(socket, "create_connection", connect)
    assert fetch(f"http://rebind.org:{server.port}/x.png", allow_urls=True) == b"content"
    assert connected == [(PUBLIC, server.port)]
    assert server.requests[0][1]["Host"] == f"rebind.org:{server.port}"
    with pytest.raises(MediaError, match="not a public one"):  # a new fetch checks again
        fetch(f"http://rebind.org:{server.port}/x.png", allow_urls=True)


def test_redirects_are_followed_and_counted(serve):
    routes = {"/end": respond}
    for i in range(7):
        to = f"/{i + 1}" if i < 6 else "/end"
        routes[f"/{i}"] = lambda handler, to=to: respond(handler, 302, Location=to)
    server = serve(routes)
    assert fetch(f"{server.url}/2", **HERE) == b"content"
    with pytest.raises(MediaError, match="more than 5 redirects"):
        fetch(f"{server.url}/1", **HERE)


def test_redirects_are_checked_like_first_urls(serve, names):
    places = {
        "/metadata": "http://169.254.169.254/latest/meta-data/",
        "/other": "http://other.org/x.png",
        "/private": "http://inside.example.com/x.png",
        "/file": "file:///etc/passwd",
        "/user": "http://user:secret@127.0.0.1/",
        "/gopher": "gopher://127.0.0.1/",
        "/odd": "http://127.0.0.1\\@other.org/",
    }
    names["inside.example.com"] = [["127.0.0.1"]]
    server = serve(
        {
            path: lambda handler, to=to: respond(handler, 302, Location=to)
            for path, to in places.items()
        }
    )
    # Private addresses are allowed for the first host, not for those it redirects to.
    for path in places:
        with pytest.raises(MediaError) as caught:
            fetch(server.url + path, **HERE)
        assert "secret" not in str(caught.value)
    assert len(server.requests) == len(places)


def test_a_public_host_cannot_redirect_inside(serve, names, monkeypatch):
    server = serve({"/x": lambda handler: respond(handler, 302, Location="http://in.org/y")})
    names["public.org"], names["in.org"] = [[PUBLIC]], [["10.0.0.1"]]
    real, connected = socket.create_connection, []

    def connect(address, *args, **kwargs):
        connected.append(address[0])
        return real(("127.0.0.1", server.port), *args, **kwargs)

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(MediaError, match=r"in.org is at an address"):
        fetch("http://public.org/x", allow_urls=True)
    assert connected == [PUBLIC]


def test_https_does_not_fall_back_to_http():
    target = parse("https://a.org/x/y")
    assert str(target.redirected("../z")) == "https://a.org/z"
    assert target.redirected("//b.org/").host == "b.org"
    with pytest.raises(MediaError, match="https to http"):
        target.redirected("http://a.org/")


REFUSED = {
    "users": ("http://user:secret@host/x", "http://host@evil/x", "http://host\\@evil/x"),
    "white space": ("http://host\t.evil/x", "http://host\n/x", "http://ho st/x"),
    "characters": ("http://host%2eevil/x", "http://hößt/x", "http://ⓔxample/x", "http://a,b/x"),
    "brackets": ("http://[::1/x", "http://[fe80::1%25eth0]/x"),
    "ports": ("http://host:99999/x", "http://host:0/x", "http://host:8a/x"),
    "names": ("http:///x", "http://-host/x", "http://..host/x"),
    "others": ("ftp://host/x", "http://host/" + "x" * 9000),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_urls_that_parsers_disagree_about_are_refused(kind):
    for url in REFUSED[kind]:
        with pytest.raises(MediaError) as caught:
            parse(url)
        assert "secret" not in str(caught.value)


def test_a_fragment_is_not_sent_and_the_host_stands_before_it():
    target = parse("http://host#@evil/x@")
    assert (target.host, target.path) == ("host", "/")


def test_one_reading_of_a_url():
    target = parse("HTTP://Exämple.com/".replace("ä", "a").upper() + "a b/ü?q=ü&r=1 2#part")
    assert (target.scheme, target.host, target.port) == ("http", "example.com", 80)
    assert target.path == "/a%20b/%C3%BC?q=%C3%BC&r=1%202"
    assert parse("https://a.org.:8443").authority == "a.org:8443"
    assert parse("https://[2606:4700::1111]/x").authority == "[2606:4700::1111]"


@pytest.mark.one_is_quick
@pytest.mark.parametrize("status", [201, 204, 301, 400, 401, 403, 404, 410, 451])
def test_other_statuses_are_errors_that_name_them(serve, status, pauses):
    server = serve({"/folder/photo.png": lambda handler: respond(handler, status)})
    with pytest.raises(MediaError, match=f"answered {status}") as caught:
        fetch(f"{server.url}/folder/photo.png?token=secret", **HERE)
    text = str(caught.value)
    assert f"{server.url}/.../photo.png" in text
    assert "secret" not in text
    assert "/folder" not in text
    assert (len(server.requests), pauses) == (1, [])


@pytest.mark.one_is_quick
@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_requests_to_busy_servers_are_made_three_times(serve, status, pauses):
    server = serve({"/x": lambda handler: respond(handler, status)})
    with pytest.raises(MediaError, match=rf"answered {status} .* \(3 tries\)"):
        fetch(server.url + "/x", **HERE)
    assert len(server.requests) == 3
    assert pauses == [1.0, 2.0]


def test_a_later_try_may_succeed(serve, pauses):
    statuses = [503, 429, 200]
    server = serve({"/x": lambda handler: respond(handler, statuses.pop(0))})
    assert fetch(server.url + "/x", **HERE) == b"content"
    assert pauses == [1.0, 2.0]


def test_broken_connections_are_tried_again(serve, pauses):
    bodies = [b"con", b"content"]  # the first ends before its declared length

    def cut(handler):
        respond(handler, body=bodies.pop(0), Content_Length="7")

    server = serve({"/x": cut})
    assert fetch(server.url + "/x", **HERE) == b"content"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(MediaError, match=r"no connection \(3 tries\)"):
            fetch(f"http://127.0.0.1:{free.getsockname()[1]}/x", **HERE)


def test_unknown_names(monkeypatch, pauses):
    def fail(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(MediaError, match=r"name is not known \(3 tries\)"):
        fetch("http://nowhere.example/x.png", allow_urls=True)


def test_tries_end_at_the_deadline(serve, clock):
    """There is no time for the pause before the next one."""

    def busy(handler):
        clock.pass_by(59.5)
        respond(handler, 503)

    server = serve({"/x": busy})
    with pytest.raises(MediaError, match=r"answered 503 .*\(1 try\)"):
        fetch(server.url + "/x", fetch_timeout=60, **HERE)


def test_a_declared_size_over_the_limit_is_not_downloaded(serve):
    server = serve({"/x": lambda handler: respond(handler, Content_Length=str(10**12))})
    with pytest.raises(MediaLimitError, match="1000000000000 bytes, 5 are allowed"):
        fetch(server.url + "/x", max_bytes=5, **HERE)


def test_the_download_stops_at_the_limit(serve):
    sent = []

    def endless(handler):
        handler.send_response(200)
        handler.end_headers()
        while True:
            sent.append(handler.wfile.write(b"x" * 65536))

    server = serve({"/x": endless})
    with pytest.raises(MediaLimitError, match="1000000 are allowed"):
        fetch(server.url + "/x", max_bytes=1_000_000, **HERE)
    assert len(sent) < 500


def test_exactly_the_limit_is_allowed(serve):
    server = serve({"/x": respond, "/y": lambda handler: respond(handler, Content_Length=None)})
    for path in ("/x", "/y"):
        assert fetch(server.url + path, max_bytes=7, **HERE) == b"content"
        with pytest.raises(MediaLimitError):
            fetch(server.url + path, max_bytes=6, **HERE)


def test_compressed_answers_are_refused(serve):
    server = serve({"/x": lambda handler: respond(handler, Content_Encoding="gzip")})
    with pytest.raises(MediaError, match="compresses"):
        fetch(server.url + "/x", **HERE)


def drip_body(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "10000")
    handler.end_headers()
    for _ in range(1000):
        handler.wfile.write(b"x")
        time.sleep(0.05)


def drip_headers(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    for i in range(1000):
        handler.wfile.write(f"X-{i % 90}: y\r\n".encode())
        time.sleep(0.05)


def silent(handler):
    time.sleep(50)


@pytest.mark.full
@pytest.mark.parametrize(
    "behaviour",
    [drip_body, *(pytest.param(way, marks=pytest.mark.full) for way in (drip_headers, silent))],
)
def test_slow_servers_end_at_the_deadline(serve, behaviour):
    server = serve({"/x": behaviour})
    start = time.monotonic()
    with pytest.raises(MediaTimeoutError, match=r"within 0.6 s; raise media_fetch_timeout"):
        fetch(server.url + "/x", fetch_timeout=0.6, **HERE)
    assert 0.5 < time.monotonic() - start < 60


@pytest.mark.full
def test_slow_name_lookups_end_at_the_deadline_of_the_manager(monkeypatch):
    asleep, plugins = threading.Event(), PluginManager()
    plugins.register(remote, name="remote")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: asleep.wait(120))
    limits = replace(MediaLimits(), allow_urls=True, fetch_timeout=0.3)
    start = time.monotonic()
    with pytest.raises(MediaTimeoutError, match=r"'remote' .*slow\.example/x.png.* within 0\.3 s"):
        plugins.fetch_media(MediaRef(kind="image", uri="http://slow.example/x.png"), limits)
    assert time.monotonic() - start < 60
    asleep.set()


def test_proxies_of_the_environment_are_not_used(serve, monkeypatch):
    proxy, server = serve({}), serve({"/x": respond})
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy.url)
    assert fetch(server.url + "/x", **HERE) == b"content"
    assert proxy.requests == []


@pytest.fixture
def secure(serve, monkeypatch, tmp_path):
    """Returns a function from certified names to an https server whose authority is trusted."""
    trustme = pytest.importorskip("trustme", reason="needs trustme, which the extra 'dev' installs")

    def start(*identities, is_trusted=True):
        authority = trustme.CA()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(*identities).configure_cert(context)
        if is_trusted:
            authority.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
        remote_http.tls_context.cache_clear()
        return serve({"/x": respond}, context)

    yield start
    remote_http.tls_context.cache_clear()


def test_certificates_are_verified_for_the_name(secure, names):
    """The connection goes to an address, but the certificate is checked against the name."""
    server = secure("images.example.com")
    names["images.example.com"] = names["other.example.com"] = [["127.0.0.1"]]
    limits = HERE | {"allowed_domains": ("*.example.com",)}
    assert fetch(f"https://images.example.com:{server.port}/x", **limits) == b"content"
    with pytest.raises(MediaError, match=r"certificate is not valid"):
        fetch(f"https://other.example.com:{server.port}/x", **limits)


def test_unknown_authorities_are_refused(secure):
    server = secure("127.0.0.1", is_trusted=False)
    with pytest.raises(MediaError, match="certificate is not valid"):
        fetch(f"https://127.0.0.1:{server.port}/x", **HERE)
    assert server.requests == []
