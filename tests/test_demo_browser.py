"""The demo's page in a real browser, as a visitor meets it."""

from __future__ import annotations

import pytest
from _browser import Visitor, chromium, missing

from demo import comparing, models
from demo.page import LAUNCH, build
from demo.studio import Studio

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def served():
    """The page's address, and the studio behind it."""
    lacking = missing()
    assert lacking is None, lacking  # a skip would hide that nobody looked
    rounds = pytest.MonkeyPatch()
    rounds.setattr(comparing, "ROUNDS", 1)  # nobody reads the times
    studio = Studio(models.load(device="cpu"))
    page = build(studio)
    _, url, _ = page.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **LAUNCH)
    yield url, studio
    page.close()
    studio.close()
    rounds.undo()


@pytest.fixture(scope="module")
def driver(served, tmp_path_factory):
    found = chromium(tmp_path_factory.mktemp("chromium"))
    yield found
    found.quit()


other_driver = driver  # of a second visitor


@pytest.fixture
def visitor(served, driver):
    """With the page newly open. Nothing may have failed in the browser by the end."""
    found = Visitor(driver, served[0])
    yield found
    assert found.complaints() == []


def test_both_pictures_and_bit_equal(visitor):
    visitor.write("prompt", "a cat face")
    visitor.press("draw")
    said = visitor.reads("verdict", "bit-equal", "eager", "accelerated", "ms a step", "as fast, as measured")
    assert "replayed 40, eager 0" in said
    visitor.wait(lambda: len(visitor.pictures("eager")) == len(visitor.pictures("accelerated")) == 1)
    visitor.wait(lambda: len(visitor.pictures("slider")) == 2)
    visitor.reads("signatures", "64 × 64", "recordings made")
    visitor.reads("gauge", "MiB")


@pytest.mark.slow
def test_an_unrecorded_size_gives_its_reason_and_replays_once_recorded(visitor, served):
    stranger = served[1].model.stranger
    visitor.choose("size", "not recorded")
    visitor.press("draw")
    visitor.reads("verdict", "bit-equal", "replayed 0, eager 40", "unseen_signature", "Record it below")
    visitor.wait(lambda: visitor.value("shapes") == stranger)  # the page has filled it in
    visitor.press("record")
    visitor.reads("told", f"Recorded: {stranger}")
    visitor.wait(lambda: "not recorded" not in visitor.text("size"))
    visitor.press("draw")
    visitor.reads("verdict", "bit-equal", "replayed 40, eager 0")

    visitor.press("reset")
    visitor.reads("told", "forgotten")
    visitor.wait(lambda: "not recorded" in visitor.text("size"))


@pytest.mark.slow
def test_a_paused_call_is_eager_and_a_random_seed_is_shown(visitor):
    visitor.press("paused")
    visitor.press("randomize")
    visitor.press("draw")
    said = visitor.reads("verdict", "bit-equal", "replayed 0, eager 40", "paused")
    visitor.wait(lambda: visitor.value("seed") != "0")
    assert f"seed {visitor.value('seed')};" in said


BAD = {
    "an empty prompt": ("prompt", "", "draw", "verdict", "The prompt is empty"),
    "a size of 7": ("own-size", "7", "draw", "verdict", "“7” is not a size"),
    "a size of 7x7": ("own-size", "7x7", "draw", "verdict", "The nearest is 16x16"),
    "text where a size is recorded": ("shapes", "<b>hello", "record", "told", "“<b>hello” does not name a size to record"),
    "no seed": ("seed", "", "draw", "verdict", "The seed is a whole number"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_answered_in_a_sentence(visitor, case):
    place, value, button, answer, said = BAD[case]
    visitor.write(place, value)
    visitor.press(button)
    text = visitor.reads(answer, said)
    assert "Traceback" not in visitor.driver.page_source and text.rstrip().endswith(".")


@pytest.mark.slow
def test_two_visitors_at_once_each_get_their_own_picture(served, driver, other_driver):
    one, other = Visitor(driver, served[0]), Visitor(other_driver, served[0])
    one.write("seed", "1")
    other.write("seed", "2")
    one.press("draw")
    other.press("draw")
    for visitor, seed in ((one, 1), (other, 2)):
        visitor.reads("verdict", "bit-equal", "replayed 40, eager 0", f"seed {seed};")
        visitor.wait(lambda v=visitor: len(v.pictures("eager")) == len(v.pictures("accelerated")) == 1)
    assert one.sources("eager") != other.sources("eager")
    assert one.complaints() == other.complaints() == []


@pytest.mark.slow
def test_the_page_fits_a_phone(served, other_driver):
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    other_driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    visitor = Visitor(other_driver, served[0])
    assert visitor.width() <= 390
    visitor.press("draw")
    visitor.reads("verdict", "bit-equal")
    visitor.wait(lambda: len(visitor.pictures("eager")) == len(visitor.pictures("accelerated")) == 1)
    assert visitor.width() <= 390
    other_driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
