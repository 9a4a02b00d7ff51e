"""moto's S3 server on loopback, as a process of its own, with one bucket: real HTTP, in memory."""

from __future__ import annotations

import sys

import boto3
from moto.server import ThreadedMotoServer

if __name__ == "__main__":
    port = int(sys.argv[1])
    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1")
    client.create_bucket(Bucket="blocks")
    print(port, flush=True)
    sys.stdin.read()
