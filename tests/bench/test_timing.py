from phasewise.bench import timing


class Graph:
    """A graph that takes as long as it is told to, and counts its replays."""

    def __init__(self, milliseconds):
        self.milliseconds, self.replays = milliseconds, 0

    def replay(self):
        self.replays += 1


def test_slow_calls_are_replayed_less_often_and_all_have_quartiles(monkeypatch):
    graphs = {"quick": Graph(2.0), "slow": Graph(2 * timing.SLOW)}

    def replayed(graph, repeats):
        for _ in range(repeats):
            graph.replay()
        return [graph.milliseconds] * repeats

    monkeypatch.setattr(timing, "_captured", lambda name: graphs[name()])
    monkeypatch.setattr(timing, "_replayed", replayed)
    times = timing.side_by_side({name: lambda name=name: name for name in graphs})
    assert graphs["quick"].replays == 1 + 9 * 4
    assert graphs["slow"].replays == 1 + timing.SLOW_ROUNDS
    assert times["slow"] == timing.Time(2 * timing.SLOW, 2 * timing.SLOW, 2 * timing.SLOW)
