"""A streamer that records its inputs."""

from transformers.generation.streamers import BaseStreamer


class Written(BaseStreamer):
    """Ids of each call, and whether the answer has ended."""

    def __init__(self):
        self.pieces, self.ended = [], False

    def put(self, value):
        self.pieces.append(value.flatten().tolist())

    def end(self):
        self.ended = True
