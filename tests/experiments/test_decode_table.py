"""The table of decoding names what was measured, and leaves open what was not."""

from experiments.decode_table import table


def row(subject, keys, median, share):
    took = {"median": median, "low": median - 0.001, "high": median + 0.001}
    return {"subject": subject, "width": 64, "keys": keys, "ms": took, "share_of_copy": share}


def test_a_row_holds_a_subjects_times_and_shares_at_every_length():
    document = {
        "values": {
            "times": [row("rope", 4096, 0.02, 0.5), row("rope", 16_384, 0.07, 0.9), row("pope", 4096, 0.03, 0.4)]
        },
        "recipe": {
            "keys": [4096, 16_384], "samples": "samples", "what": "what", "rows": 8, "heads": 32, "key_heads": 8,
            "bytes": "copies",
        },
        "device": "GPU", "commit": "0123456789abc", "versions": {"torch": "2"},
    }  # fmt: skip
    lines = table(document).splitlines()
    assert lines[2] == "| 64 | rope | 20.0 (19.0 to 21.0) | 70.0 (69.0 to 71.0) | 0.50, 0.90 |"
    assert lines[3] == "| 64 | pope | 30.0 (29.0 to 31.0) |  | 0.40,  |"
    assert lines[-1].endswith("A share is of copies. GPU, commit 0123456789, torch 2.")
