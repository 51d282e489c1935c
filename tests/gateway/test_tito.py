"""The tree of turns: what a request continues, what opens a branch, and what is trained on."""

from functools import cache

import pytest

from psrl.chat import load_renderer
from psrl.gateway.tito import SessionTree, says_the_same
from psrl.types import EpisodeUid, FinishReason, Generation, Message, Role, ToolCall, ToolSchema
from tests.real_models import qwen3_tokenizer_path

SYSTEM = Message(role=Role.SYSTEM, content="Be brief.")
QUESTION = Message(role=Role.USER, content="What is 2 + 3?")
TOOL = ToolSchema(name="run", description="Run it.", parameters={"type": "object", "properties": {}})
UID = EpisodeUid("train-0-000001-e0")


def user(text):
    return Message(role=Role.USER, content=text)


def assistant(text, **fields):
    return Message(role=Role.ASSISTANT, content=text, **fields)


def tool_says(text):
    return Message(role=Role.TOOL, content=text, tool_call_id="call-0-0", name="run")


@cache
def qwen3(history_thinking):
    return load_renderer(str(qwen3_tokenizer_path()), tool_format="hermes", history_thinking=history_thinking)


class Talk:
    """A tree on Qwen3's tokenizer, and turns sampled for it by hand."""

    def __init__(self, history_thinking="keep"):
        self.renderer = qwen3(history_thinking)
        self.tree = SessionTree(self.renderer)

    def place(self, messages, tools):
        return self.tree.place(messages, tools, self.tree.continued_by(messages, tools))

    def turn(self, messages, text, tools=(), *, answer=None):
        """Place `messages`, then sample `text` and the end of the turn; (branch, the captured turn)."""
        branch = self.place(tuple(messages), tuple(tools))
        ids = [*self.renderer.template.encode(text), self.renderer.stop_token_ids[0]]
        generation = Generation(
            token_ids=ids,
            logprobs=[-0.25 * (1 + index) for index in range(len(ids))],
            policy_versions=[3] * len(ids),
            finish_reason=FinishReason.STOP,
            prompt_tokens=len(branch.context_ids),
            cached_tokens=0,
            latency_s=0.0,
        )
        parsed = self.renderer.parse(ids, turn=0)
        made = answer or assistant(parsed.content, reasoning=parsed.reasoning or None, tool_calls=parsed.calls)
        return branch, self.tree.capture(branch, generation, id=f"t{len(self.tree.turns)}", answer=made, text=parsed.text, temperature=1.0)


@pytest.fixture
def talk():
    return Talk()


def test_a_request_that_extends_the_conversation_continues_its_ids(talk):
    first, turn = talk.turn([SYSTEM, QUESTION], "It is 5.")
    second, _ = talk.turn([SYSTEM, QUESTION, turn.answer, user("Sure?")], "Yes.")
    assert second.context_ids[: len(first.context_ids) + len(turn.generation.token_ids)] == first.context_ids + turn.generation.token_ids
    assert talk.renderer.decode(second.observation_ids) == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    (trajectory,) = talk.tree.trajectories(UID)
    assert trajectory.num_turns == 2
    assert trajectory.uid == f"{UID}-t0"


def test_what_was_sampled_is_never_encoded_again(talk):
    """'It' 'is' as single letters: ids that the tokenizer would never make from this text."""
    branch = talk.place((QUESTION,), ())
    letters = [talk.renderer.template.encode(letter)[0] for letter in "Five"]
    ids = [*letters, talk.renderer.stop_token_ids[0]]
    assert talk.renderer.template.encode("Five") != letters
    generation = Generation(
        token_ids=ids,
        logprobs=[-1.0] * 5,
        policy_versions=[0] * 5,
        finish_reason=FinishReason.STOP,
        prompt_tokens=1,
        cached_tokens=0,
        latency_s=0,
    )
    talk.tree.capture(branch, generation, id="t0", answer=assistant("Five"), text="Five", temperature=1.0)
    following = talk.place(
        (
            QUESTION,
            assistant("Five"),
            user("And?"),
        ),
        (),
    )
    assert following.context_ids[: len(branch.context_ids) + 5] == branch.context_ids + ids


def test_reasoning_that_the_client_dropped_stays_in_the_context(talk):
    first, turn = talk.turn([QUESTION], "<think>\nadd\n</think>\n\nIt is 5.")
    second = talk.place(
        (
            QUESTION,
            assistant("It is 5."),
            user("Sure?"),
        ),
        (),
    )
    assert second.context_ids[: len(first.context_ids) + len(turn.generation.token_ids)] == first.context_ids + turn.generation.token_ids


def test_strip_opens_a_branch_where_the_template_drops_reasoning():
    talk = Talk("strip")
    _, turn = talk.turn([QUESTION], "<think>\nadd\n</think>\n\nIt is 5.")
    branch = talk.place(
        (
            QUESTION,
            turn.answer,
            user("Sure?"),
        ),
        (),
    )
    assert branch.parent is None
    assert "add" not in talk.renderer.decode(branch.context_ids)
    _, second = talk.turn([QUESTION, turn.answer, user("Sure?")], "Yes.")
    third = talk.place(
        (
            QUESTION,
            turn.answer,
            user("Sure?"),
            second.answer,
            user("Really?"),
        ),
        (),
    )
    assert third.parent is second


def test_strip_knows_its_branch_again_when_the_client_drops_reasoning():
    talk = Talk("strip")
    talk.turn([QUESTION], "<think>\nadd\n</think>\n\nIt is 5.")
    echoes = [QUESTION, assistant("It is 5."), user("Sure?")]
    _, second = talk.turn(echoes, "Yes.")
    assert (
        talk.place(
            (
                *echoes,
                second.answer,
                user("Really?"),
            ),
            (),
        ).parent
        is second
    )


def test_strip_goes_on_where_a_tool_answers():
    talk = Talk("strip")
    _, turn = talk.turn([QUESTION], '<think>\nrun it\n</think>\n\n<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>', [TOOL])
    branch = talk.place(
        (
            QUESTION,
            turn.answer,
            tool_says("5"),
        ),
        (TOOL,),
    )
    assert branch.parent is turn


def test_an_edited_answer_opens_a_branch_from_the_last_unchanged_turn_and_is_not_trained_on(talk):
    _, first = talk.turn([QUESTION], "It is 5.")
    _, second = talk.turn([QUESTION, first.answer, user("Sure?")], "Yes.")
    edited = [QUESTION, first.answer, user("Sure?"), assistant("No, wait."), user("Well?")]
    branch, third = talk.turn(edited, "Five.")
    assert branch.parent is first
    assert "No, wait." in talk.renderer.decode(branch.observation_ids)
    one, other = talk.tree.trajectories(UID)
    assert [step.sampled_ids for step in one.steps] == [first.generation.token_ids, second.generation.token_ids]
    assert [step.sampled_ids for step in other.steps] == [third.generation.token_ids]


def test_a_shared_turn_is_trained_on_once_and_context_in_the_other_branch(talk):
    _, first = talk.turn([QUESTION], "It is 5.")
    _, second = talk.turn([QUESTION, first.answer, user("Sure?")], "Yes.")
    _, third = talk.turn([QUESTION, first.answer, user("Why?")], "By adding.")
    one, other = talk.tree.trajectories(UID)
    sampled = [len(turn.generation.token_ids) for turn in (first, second, third)]
    assert one.num_sampled == sampled[0] + sampled[1]
    assert other.num_sampled == sampled[2]
    assert other.ids()[: first.num_tokens] == one.ids()[: first.num_tokens]
    assert other.loss_mask()[: first.num_tokens] == [0] * first.num_tokens
    assert other.logprobs()[-sampled[2] :] == third.generation.logprobs


def test_an_edited_question_begins_anew(talk):
    _, first = talk.turn([QUESTION], "It is 5.")
    branch = talk.place(
        (
            user("What is 2 + 4?"),
            first.answer,
            user("Sure?"),
        ),
        (),
    )
    assert branch.parent is None
    assert branch.context_ids == talk.renderer.open([user("What is 2 + 4?"), first.answer, user("Sure?")], ())


def test_other_tools_begin_anew(talk):
    _, first = talk.turn([QUESTION], "It is 5.")
    branch = talk.place(
        (
            QUESTION,
            first.answer,
            user("Sure?"),
        ),
        (TOOL,),
    )
    assert branch.parent is None


def test_the_same_request_twice_gives_two_leaves(talk):
    talk.turn([QUESTION], "It is 5.")
    talk.turn([QUESTION], "Five.")
    assert len(talk.tree.trajectories(UID)) == 2


def test_of_two_equal_answers_the_newest_is_continued(talk):
    talk.turn([QUESTION], "It is 5.")
    _, again = talk.turn([QUESTION], "It is 5.")
    assert (
        talk.place(
            (
                QUESTION,
                again.answer,
                user("Sure?"),
            ),
            (),
        ).parent
        is again
    )


def test_two_conversations_of_sub_agents_do_not_mix(talk):
    _, one = talk.turn([SYSTEM, user("a")], "A.")
    _, other = talk.turn([SYSTEM, user("b")], "B.")
    assert (
        talk.place(
            (
                SYSTEM,
                user("a"),
                one.answer,
                user("more"),
            ),
            (),
        ).parent
        is one
    )
    assert (
        talk.place(
            (
                SYSTEM,
                user("b"),
                other.answer,
                user("more"),
            ),
            (),
        ).parent
        is other
    )


def test_a_turn_that_was_cut_is_closed_before_the_next_message(talk):
    branch = talk.place((QUESTION,), ())
    ids = talk.renderer.template.encode("It is")
    generation = Generation(
        token_ids=ids,
        logprobs=[-1.0] * len(ids),
        policy_versions=[0] * len(ids),
        finish_reason=FinishReason.LENGTH,
        prompt_tokens=1,
        cached_tokens=0,
        latency_s=0,
    )
    talk.tree.capture(branch, generation, id="t0", answer=assistant("It is"), text="It is", temperature=1.0)
    following = talk.place(
        (
            QUESTION,
            assistant("It is"),
            user("go on"),
        ),
        (),
    )
    assert talk.renderer.decode(following.observation_ids) == "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


def call(name="run", id="call-0-0", **arguments):
    return ToolCall(id=id, name=name, arguments=arguments)


@pytest.mark.parametrize(
    ("echo", "same"),
    [
        (assistant("Five", reasoning="add", tool_calls=(call(n=1),)), True),
        (assistant("Five", tool_calls=(call(n=1),)), True),
        (assistant("  Five\n", tool_calls=(call(n=1),)), True),
        (assistant("Five", tool_calls=(call(id="other", n=1),)), True),
        (assistant("five", tool_calls=(call(n=1),)), False),
        (assistant("Five", tool_calls=(call(n=2),)), False),
        (assistant("Five"), False),
        (assistant("Five", reasoning="guess", tool_calls=(call(n=1),)), False),
        (user("Five"), False),
    ],
)
def test_an_echo_may_lose_reasoning_white_space_and_ids_but_nothing_else(echo, same):
    assert says_the_same(echo, assistant("Five", reasoning="add", tool_calls=(call(n=1),))) is same
