#!/usr/bin/env python3
"""By how much `warmroute bench` stamps the time to first token wrong.

Captures the loopback packets of a run with the kernel's time stamps (a packet socket: Linux, root), takes for each
connection the time from its SYN to the packet with the first generated output, and compares with what `bench play` says of
the same request.

    benches/stamp.py [WARMROUTE] [REQUESTS]

starts one simulated worker on a free port of 127.0.0.1, sends REQUESTS (default 2000) at 100 a second, and prints the
difference, bench minus capture: median, 99th percentile of its absolute value, largest.
"""
import json
import socket
import struct
import subprocess
import sys
import threading

SO_RCVBUFFORCE, SO_TIMESTAMPNS, ETH_P_IP, PACKET_OUTGOING = 33, 35, 0x0800, 4
SOL_PACKET, PACKET_STATISTICS = 263, 6
SYN, ACK = 2, 16


def capture(port, stop, packets):
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_IP))
    tap.bind(("lo", ETH_P_IP))
    tap.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
    tap.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    tap.settimeout(0.2)
    while not stop.is_set():
        try:
            frame, told, _, address = tap.recvmsg(65535, 64)
        except TimeoutError:
            continue
        # Loopback shows each packet twice, on its way out and in.
        if address[2] == PACKET_OUTGOING or frame[23] != 6:
            continue
        tcp = 14 + (frame[14] & 15) * 4
        source, to = struct.unpack("!HH", frame[tcp:tcp + 4])
        if port not in (source, to):
            continue
        seconds, nanoseconds = struct.unpack("qq", told[0][2])
        packets.append((seconds * 1e3 + nanoseconds / 1e6, source, to, frame[tcp + 13],
                        frame[tcp + (frame[tcp + 12] >> 4) * 4:]))
    _, dropped = struct.unpack("II", tap.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
    if dropped:
        sys.exit(f"{dropped} packets were lost in the capture: connections cannot be told apart; try a quieter machine")


def first_outputs(packets, port):
    """Of each connection with an output, in the order of their SYNs: when that was, and the packet with the first output."""
    connections, current = [], {}
    for at, source, to, flags, payload in packets:
        if to == port and flags & (SYN | ACK) == SYN:
            # A port comes again once its last connection is over; a second SYN before any output is the first one repeated.
            if source not in current or current[source][1] is not None:
                current[source] = [at, None]
                connections.append(current[source])
        elif source == port and to in current and current[to][1] is None:
            # The chunk with the bare role has empty content.
            if b'"content":"' in payload.replace(b'"content":""', b""):
                current[to][1] = at
    # Questions about models, tokens and the like have no output.
    return [connection for connection in connections if connection[1] is not None]


def main():
    warmroute = sys.argv[1] if len(sys.argv) > 1 else "target/release/warmroute"
    requests = sys.argv[2] if len(sys.argv) > 2 else "2000"
    engine = subprocess.Popen([warmroute, "engine", "--port", "0", "--enable-prompt-tokens-details"],
                              stdout=subprocess.PIPE, text=True)
    try:
        url = engine.stdout.readline().strip()
        port = int(url.rsplit(":", 1)[1])
        stop, packets = threading.Event(), []
        tap = threading.Thread(target=capture, args=(port, stop, packets))
        tap.start()
        out = subprocess.run(
            [warmroute, "bench", "play", "--target", url, "--workload", "hot", "--rate", "100", "--requests", requests,
             "--prefixes", "4", "--prefix-tokens", "64", "--prompt-tokens", "120", "--output-tokens", "2", "--json", "--samples"],
            stdout=subprocess.PIPE, check=True)
        stop.set()
        tap.join()
    finally:
        engine.terminate()
        engine.wait()
    samples = json.loads(out.stdout)["points"][0]["runs"][0]["samples"]
    # Probes come first, each on a connection of its own; requests are started in the order of their places.
    seen = first_outputs(packets, port)[-len(samples):]
    differences = sorted(sample[1] - (output - began) for sample, (began, output) in zip(samples, seen))
    share = lambda values, part: values[min(len(values) - 1, int(part * len(values)))]
    wrong = sorted(abs(one) for one in differences)
    ttft = sorted(sample[1] for sample in samples)
    print(f"{len(differences)} of {len(samples)} requests, TTFT p50 {share(ttft, .5):.1f} ms; bench minus capture: "
          f"median {share(differences, .5):.3f} ms, p99 of the absolute {share(wrong, .99):.3f} ms, most {wrong[-1]:.3f} ms")
    return 0 if len(differences) == len(samples) and share(wrong, .99) < 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
