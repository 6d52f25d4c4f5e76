"""A fake engine: every POST is answered with an SSE stream of N events, one each SECONDS. drip.py PORT N SECONDS"""
import asyncio, json, sys

port, n, gap = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
EV = b"data: " + json.dumps({"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m",
     "choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}]}).encode() + b"\n\n"
CH = b"%x\r\n%s\r\n" % (len(EV), EV)
END = b"data: [DONE]\n\n"
FIN = b"%x\r\n%s\r\n0\r\n\r\n" % (len(END), END)
LIST = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()


async def serve(r, w):
    try:
        while True:
            head = await r.readuntil(b"\r\n\r\n")
            low = head.lower()
            if b"content-length:" in low:
                await r.readexactly(int(low.split(b"content-length:")[1].split(b"\r\n")[0]))
            if head.startswith(b"POST"):
                w.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
                for _ in range(n):
                    w.write(CH)
                    await asyncio.sleep(gap)
                w.write(FIN)
            else:
                w.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(LIST), LIST))
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        w.close()


async def main():
    s = await asyncio.start_server(serve, "127.0.0.1", port, backlog=4096)
    await s.serve_forever()

asyncio.run(main())
