"""What the forward passes of a model are given."""


def fed_shapes(model, monkeypatch):
    """A list that grows by the shape [rows, tokens] of the ids of each pass of the decoder."""
    fed, original = [], model.model.embed_tokens.forward

    def watched(ids):
        fed.append(ids.shape)
        return original(ids)

    monkeypatch.setattr(model.model.embed_tokens, "forward", watched)
    return fed
