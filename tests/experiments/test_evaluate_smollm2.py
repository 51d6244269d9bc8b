from experiments.evaluate_smollm2 import PAGE, table


def test_the_page_holds_the_table_of_the_records():
    assert table() in PAGE.read_text()
