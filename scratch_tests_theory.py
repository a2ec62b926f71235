"""Tests of theory.py, to be merged into tests.py, whose helpers and fixtures they use.

A simulation is held to its closed form within three standard errors. Where a test makes n comparisons at once, the
limit is the one that a sound simulation passes with the same risk, 0.27% for all n together: `limit(n)`."""
from statistics import NormalDist

import theory
from tests import *
from tests import corpus, trained  # noqa: F401 (fixtures)


# ---------------------------------------------------------------- theory.py: formulas and simulations

def limit(comparisons):
    """3.0 for one comparison, 4.5 for 300: the same chance, 0.27%, that any of them is beyond it (Bonferroni)."""
    return NormalDist().inv_cdf(1 - 0.00135 / comparisons)


def errors_off(draws, closed):
    """How many standard errors the mean over the first axis is from its closed form; 1e-10 of it is rounding."""
    error = draws.std(0, ddof=1) / math.sqrt(len(draws))
    return np.ravel(np.abs(draws.mean(0) - closed) / np.maximum(error, 1e-10 * np.abs(closed)))


def test_theory_mixing_by_hand():
    assert limit(1) == pytest.approx(3, abs=1e-3)
    assert theory.plane_factor(1.0) == pytest.approx(0.8414709848) and theory.plane_factor(np.pi) == pytest.approx(0)
    assert theory.plane_factor(0.0) == 1 and theory.reflection_factor(64) == 0.96875
    assert theory.mixing_window(0.5, 0.125) == pytest.approx(3) and theory.mixing_window(1.0) == math.inf
    assert theory.mixing_window(theory.plane_factor(1.0), 0.1) == pytest.approx(13.3405, abs=1e-3)
    # small angles: sin(w)/w = 1 - w^2/6, so n = 6 ln(1/eps) / w^2
    assert theory.mixing_window(theory.plane_factor(1e-3), 0.1) == pytest.approx(6e6 * math.log(10), rel=1e-6)
    assert theory.frequencies(64)[[0, 16]] == pytest.approx([1, 0.01])
    mixed = [[(theory.mixing_window(theory.plane_factor(theory.frequencies(d))) <= n).sum() for n in (512, 65_536, 2 ** 20)]
             for d in (64, 96)]
    assert mixed == [[7, 15, 20], [10, 23, 30]]
    assert theory.expected_score(np.array([0, 1, 2]), [1.0, 0.5]) == pytest.approx([1, 0.75, 0.625])
    assert theory.expected_score(np.array([2]), [1j]) == pytest.approx([-1])


def test_theory_simulated_routes_shrink_as_their_closed_forms():
    w, few, rng = theory.frequencies(64), 4 ** np.arange(6), np.random.default_rng(11)
    planes = np.stack([np.cos(phase[:, few - 1]) for phase in theory.simulate_phases(w, 1024, 2000, rng)], 1)
    z = [errors_off(planes, theory.plane_factor(w)[:, None] ** few)]
    steps = np.arange(1, 41)
    for d in (4, 16):
        z.append(errors_off(theory.simulate_products(d, 0.5, 40, 1000, rng), theory.plane_factor(0.5) ** steps))
        z.append(errors_off(theory.simulate_products(d, None, 40, 1000, rng), theory.reflection_factor(d) ** steps))
    z = np.concatenate(z)
    assert z.max() < limit(z.size)
    # and it can fail: a factor that is off by 2% a step does not pass
    wrong = theory.simulate_products(16, 0.5, 40, 1000, rng)
    assert errors_off(wrong, (theory.plane_factor(0.5) * 1.02) ** steps).max() > limit(40)


def test_theory_simulated_steps_are_orthogonal_and_dense():
    rng = np.random.default_rng(12)
    for w in (0.5, None):
        scores = theory.simulate_products(6, w, 30, 500, rng)
        assert np.abs(scores).max() <= 1 + 1e-12 and scores[:, -1].std() == pytest.approx(6 ** -0.5, rel=0.15)


@pytest.mark.parametrize("T", [300, 4097])
def test_theory_window_does_not_depend_on_the_text(T):
    """randrot itself, at the end of a short and of a long text: after n steps E[cos] is c^n in both."""
    position = Position(GPTConfig(pos="randrot_qk", block_size=32, vocab_size=70, n_layer=1, n_head=12, n_embd=96), 0)
    n, idx = 40, torch.zeros(60, T, dtype=torch.int64)
    x = torch.zeros(1, T, 96).expand(60, -1, -1)
    route = position(x, x, idx, torch.arange(60)).qk
    phase = torch.atan2(route.sin[:, :, [-1, -1 - n]], route.cos[:, :, [-1, -1 - n]]).double()
    turned = (phase[:, :, 0] - phase[:, :, 1]).cos().flatten(0, 1).numpy()                    # (routes, planes)
    assert errors_off(turned, theory.plane_factor(theory.frequencies(8)) ** n).max() < limit(4)


def test_theory_score_bounds_by_hand():
    assert theory.cap_bound(0.5, 16) == pytest.approx(math.exp(-2))
    assert theory.hoeffding_bound(1.0, np.array([0.5, 0.5])) == pytest.approx(math.exp(-1))
    assert theory.phase_bound(1.0, np.array([0.5, 0.5])) == pytest.approx(math.exp(-2))
    assert theory.phase_bound(0.3, np.full(32, 2 / 64)) == pytest.approx(theory.cap_bound(0.3, 64))
    for t in np.linspace(0, 1, 101):
        assert (1 - t) / 2 <= theory.cap_bound(t, 3)                                          # Archimedes: a cap of the sphere
        assert math.acos(t) / math.pi <= theory.cap_bound(t, 2)
        assert math.acos(t) / math.pi <= theory.phase_bound(t, np.array([1.0])) <= theory.hoeffding_bound(t, np.array([1.0]))
    for s in np.linspace(0, 30, 61):                                                          # I_0(s) <= e^(s^2/4)
        assert np.i0(s) <= math.exp(s * s / 4) * (1 + 1e-12)


@pytest.mark.parametrize("d", [16, 32, 64, 128, 256])
def test_theory_scores_exceed_no_more_than_their_bounds_allow(d):
    n, weights = 10_000, np.full(d // 2, 2 / d)
    drawn = theory.simulate_scores(d, n, np.random.default_rng(d))
    uneven = np.random.default_rng(d + 1).uniform(0, 1, d // 2)
    drawn["uneven"] = uneven @ np.cos(np.random.default_rng(d + 2).uniform(-np.pi, np.pi, (d // 2, n)))

    def too_many(x, bound, t):
        """More exceedances than n draws of an event as likely as the bound can have, three standard deviations up."""
        return (x >= t).sum() > n * bound + 3 * math.sqrt(n * bound)
    for t in np.linspace(0.25, 4, 16) / math.sqrt(d):
        assert not too_many(drawn["Haar"], theory.cap_bound(t, d), t)
        assert not too_many(drawn["mixed planes"], theory.phase_bound(t, weights), t)
        assert not too_many(drawn["mixed planes"], theory.hoeffding_bound(t, weights), t)
        s = t * math.sqrt(d) * np.sqrt(np.square(uneven).sum() / 2)
        assert not too_many(drawn["uneven"], theory.phase_bound(s, uneven), s)
    # and it can fail: with the exponent doubled, three standard deviations of the score are exceeded too often
    t = 2.5 / math.sqrt(d)
    assert too_many(drawn["mixed planes"], theory.phase_bound(t, weights) ** 2, t)
    assert d < 64 or too_many(drawn["Haar"], theory.cap_bound(t, d) ** 2, t)
    # the two kinds have the same variance, 1/d
    for x in (drawn["Haar"], drawn["mixed planes"]):
        assert errors_off(x ** 2, 1 / d).max() < limit(2)


def test_theory_far_mass_by_hand():
    assert theory.far_mass(np.zeros(3), np.zeros(1)) == pytest.approx(0.25)
    assert theory.far_mass(np.array([1000.0]), np.array([1000.0, 1000.0])) == pytest.approx(2 / 3)
    assert theory.far_mass_bound(4, 12, 0.0) == pytest.approx(0.75)
    assert theory.far_mass_bound(1, 1, math.log(3) / 2) == pytest.approx(0.25)
    assert theory.far_mass_bound(512, 1e30, 4.0) == pytest.approx(1)                          # tends to 1
    assert theory.far_mass_bound(10, 0, 1.0) == 0


def far_mass_draws(rng, worst):
    """10,000 settings: K to 64, M to 256 (each tenth to 10^4), lambda to 8; logits uniform, or at the worst corner."""
    for draw in range(10_000):
        K, M, lam = rng.integers(1, 65), rng.integers(1, 10_001 if draw % 10 == 0 else 257), rng.uniform(0, 8)
        near, far = (np.full(K, lam), np.full(M, -lam)) if worst else (rng.uniform(-lam, lam, K), rng.uniform(-lam, lam, M))
        yield theory.far_mass(near, far), theory.far_mass_bound(K, M, lam)


@pytest.mark.parametrize("worst", [False, True])
def test_theory_far_mass_is_never_below_its_bound(worst):
    pairs = np.array(list(far_mass_draws(np.random.default_rng(21), worst)))
    assert (pairs[:, 0] < pairs[:, 1] * (1 - 1e-12)).sum() == 0
    if worst:  # tight, so this test fails for a bound that is 10% higher
        assert pairs[:, 0] == pytest.approx(pairs[:, 1], rel=1e-10)
        assert (pairs[:, 0] < 1.1 * pairs[:, 1]).sum() == 10_000
        assert (pairs[:, 0] < 1 / (1 + (1 / pairs[:, 1] - 1) * 0.9)).sum() == 10_000          # e^(2 lambda) 10% lower


def test_theory_far_mass_sweep_to_a_million():
    rng = np.random.default_rng(22)
    for K, lam, M in [(K, lam, M) for K in (1, 16, 512) for lam in (0.0, 0.5, 2.0, 4.0) for M in (1, 1000, 10 ** 6)]:
        bound = theory.far_mass_bound(K, M, lam)
        assert theory.far_mass(rng.uniform(-lam, lam, K), rng.uniform(-lam, lam, M)) >= bound * (1 - 1e-12)
        assert theory.far_mass(np.full(K, lam), np.full(M, -lam)) == pytest.approx(bound, rel=1e-10)


def test_theory_what_holds_far_mass():
    rng, K, slope, lam = np.random.default_rng(23), 64, 1 / 64, 1.0
    for M in (1, 100, 5000):  # the closed form of the bias against its logits one by one
        bias = -slope * np.arange(K + M)
        assert theory.far_mass(bias[:K] + 3, bias[K:]) == pytest.approx(theory.biased_far_mass(K, M, 3, slope))
    ceiling = theory.biased_far_mass(K, math.inf, -2 * lam, slope)
    assert ceiling < 0.9 < theory.far_mass_bound(K, 10 ** 6, lam)
    for _ in range(10_000):   # no content within 2 lambda gets past it
        content = rng.uniform(-lam, lam, 500) + bias[:500]
        assert theory.far_mass(content[:K], content[K:]) <= ceiling
    assert theory.far_mass(bias[:K] - lam, bias[K:] + lam) > 0.99 * ceiling                   # nearly reached: it can fail
    assert theory.logn_lambda(3.0, 512, 512 ** 2 - 512) == pytest.approx(6)                   # n = K^2: twice the logits
    M = np.geomspace(1e4, 1e12, 50)
    wide, narrow = (theory.far_mass_bound(512, M, theory.logn_lambda(x, 512, M)) for x in (4.0, 2.0))
    assert (np.diff(wide) < 0).all() and (np.diff(narrow) > 0).all()                          # 2 lambda against ln 512 = 6.24


def test_theory_background_by_hand_and_by_double_sum():
    assert theory.background_power(3, 0.5) == pytest.approx(5.5)                              # 3 + 2 (2/2 + 1/4)
    assert theory.background_power(7, 1.0) == 49 and theory.background_power(7, 1e-9) == pytest.approx(7)
    for c in (0.3, 0.9, 1 - 1e-4, 1 - 1e-7, 1 - 3e-9):
        for M in (1, 2, 50, 400):
            lag = np.abs(np.arange(M)[:, None] - np.arange(M))
            assert theory.background_power(M, c) == pytest.approx((c ** lag).sum(), rel=1e-8)
    M = np.array([10 ** 7])
    assert theory.background_power(M, 0.9) / M == pytest.approx(19, rel=1e-5)                 # (1 + c) / (1 - c)


def test_theory_simulated_background_matches_its_closed_form():
    w, counts = theory.frequencies(16), 4 ** np.arange(1, 6)
    power = np.stack([np.abs(np.exp(1j * phase).cumsum(1)[:, counts - 1]) ** 2
                      for phase in theory.simulate_phases(w, 1024, 4000, np.random.default_rng(31))], 1)
    z = errors_off(power, theory.background_power(counts, theory.plane_factor(w)[:, None]))
    assert z.max() < limit(z.size)
    assert errors_off(power, counts ** 2.0).max() > limit(z.size)                             # unrouted: it can fail


def test_theory_relative_norms_and_crossings():
    norms, M = theory.relative_norms(32), np.array([1.0, 50.0])
    w = theory.frequencies(32)
    assert all(norm(M)[0] == pytest.approx(1) for norm in norms.values())
    direct = np.abs(np.exp(1j * np.arange(50)[:, None] * w).sum(0)) ** 2                      # RoPE, added up
    assert norms["rope_qkv"](M)[1] == pytest.approx(math.sqrt(direct.mean()) / 50)
    assert theory.crossing(512, 4.0, norms["unrouted"]) == pytest.approx(512 * math.exp(8), rel=3e-3)
    c = math.sin(1)
    uniform = (512 * math.exp(8)) ** 2 * (1 - c) / (1 + c)                                    # M sqrt((1+c)/(1-c)/M) = K e^(2 lambda)
    assert theory.crossing(512, 4.0, norms["every plane w = 1"]) == pytest.approx(uniform, rel=3e-3)
    assert theory.crossing(512, 4.0, norms["rope_qkv"]) == math.inf                           # M R(M) is bounded


@pytest.mark.parametrize("r", [0.0, 0.5, 2.0])
def test_theory_tilt_is_what_same_route_weights_leave(r):
    rng = np.random.default_rng(41)
    assert theory.tilt(0.1) == pytest.approx(0.05, rel=2e-3)                                  # I_1(r)/I_0(r) = r/2 - ...
    phase = rng.uniform(-np.pi, np.pi, (400, 4000))
    weight = np.exp(r * np.cos(phase))
    kept = (weight * np.exp(1j * phase)).sum(1) / weight.sum(1)
    assert errors_off(kept.real, theory.tilt(r)).max() < limit(3) and errors_off(kept.imag, 0.0).max() < limit(3)
    own = (weight * np.exp(1j * rng.uniform(-np.pi, np.pi, phase.shape))).sum(1) / weight.sum(1)
    assert errors_off(own.real, 0.0).max() < limit(3)


# ---------------------------------------------------------------- theory.py: on a checkpoint

def slow_statistics(model, ids, sequence, queries, distances):
    """What theory.diagnose measures, from a matrix per step: every score, every route, nothing shared between pairs."""
    K, idx, seq = model.config.block_size, ids[None], torch.tensor([sequence])
    embedding = x = model.embed(idx)
    T, layers, routes = len(ids), [], []
    for block in model.blocks:
        layer, normed = block.attention, block.norm_1(x)
        H, D = layer.n_head, layer.head_dim
        _, routed, controls = parse_position(model.config.pos)
        q, k, v = layer.qkv(normed).view(T, 3, H, D).unbind(1)
        steps, value_steps = reference_steps(layer.position, normed, embedding, idx, seq)
        b = torch.zeros(T, H, dtype=torch.float64)
        for decay in layer.position.decays:
            b = b + (torch.tensor(LITERAL_SLOPES[H]) if isinstance(decay, positional.Alibi)
                     else -torch.log(torch.sigmoid(decay.gate(normed[0]))))
        found = {name: [] for name in theory.MEASURED}
        turned = torch.zeros(H, len(distances), D // 2, dtype=torch.complex128)
        for i in range(T):
            route = value_route = torch.eye(D, dtype=torch.float64).expand(H, D, D)
            bias, scores, values = torch.zeros(H, dtype=torch.float64), [], []
            for j in range(i, -1, -1):
                content = (q[i] * (route @ k[j, :, :, None])[..., 0]).sum(-1) / math.sqrt(D)
                scores.append(content * (layer.position.logn * math.log(i + 2) if "logn" in controls else 1) - bias)
                values.append((value_route @ v[j, :, :, None])[..., 0] if routed == "qkv" else v[j])
                if i - j in distances:
                    half, at = D // 2, distances.index(i - j)
                    cosine, sine = (route[:, range(first, first + half), range(half)] for first in (0, half))
                    turned[:, at] += torch.complex(cosine, sine) / (T - distances[at])
                if steps is not None:
                    route, value_route = route @ steps[0, j], value_route @ value_steps[0, j]
                bias = bias + b[j]
            if i not in queries:
                continue
            scores, values = torch.stack(scores), torch.stack(values)                         # (keys, H), nearest first
            weight, M, near = scores.softmax(0), max(0, i + 1 - K), min(K, i + 1)
            span = scores.max(0).values - scores.min(0).values
            far_weight, far_values = weight[K:], values[K:]
            lead = scores[:K].max(0).values - (scores[K:].mean(0) if M else 0)
            far_norm = (far_weight[..., None] * far_values).sum(0).norm(dim=-1)
            for name, value in dict(
                    far_mass=far_weight.sum(0), logit_range=span, bound=M / (M + near * span.exp()),
                    mean_bound=M / (M + near * lead.exp()), far_norm=far_norm,
                    near_norm=(weight[:K, :, None] * values[:K]).sum(0).norm(dim=-1),
                    alignment=far_norm / (far_weight * far_values.norm(dim=-1)).sum(0).clamp(min=1e-30)).items():
                found[name].append(value)
        layers.append({name: torch.stack(value, -1) for name, value in found.items()})
        routes.append(turned.abs())
        x = block(x, embedding, idx, seq)
    return {name: torch.stack([layer[name] for layer in layers]) for name in theory.MEASURED}, torch.stack(routes)


@pytest.mark.parametrize("variant", [dict(pos=pos) for pos in (
    "nope", "rope", "rope_qkv", "randrot_qk", "accrot_qkv", "alibi", "rope+alibi", "accrot_qkv+fox", "accrot_qk+logn")]
    + [dict(pos="accrot_qkv", value_route="own")], ids=lambda v: "-".join(v.values()))
@torch.no_grad()
def test_theory_measurements_equal_a_slow_computation(variant):
    model = tiny(block_size=16, **variant).double()
    for p in model.parameters():   # scores of a few nats, so that no two quantities agree by accident
        if p.ndim == 2:
            p.data *= 6
    for T, distances in ((9, [1, 4]), (41, [1, 2, 7, 33])):
        ids = tokens(T)
        got, route = theory.diagnose(model, ids, 3, distances, n_queries=5)
        want, slow_route = slow_statistics(model, ids, 3, torch.linspace(T - 8, T - 1, 5).round().long().tolist(), distances)
        for name in theory.MEASURED:
            assert got[name].shape == (2, 12, 5)
            torch.testing.assert_close(got[name], want[name], rtol=2e-4, atol=2e-5, msg=lambda m: f"{name}: {m}")
        if variant["pos"] in ("nope", "alibi"):
            assert route.shape == (2, 12, len(distances), 1) and (route - 1).abs().max() < 1e-12
        else:
            torch.testing.assert_close(route, slow_route, rtol=1e-4, atol=2e-5)
        assert (got["far_mass"] >= got["bound"] * (1 - 1e-6)).all()
        assert (got["far_mass"] >= got["mean_bound"] * (1 - 1e-6)).all()
        assert (got["mean_bound"] >= got["bound"] * (1 - 1e-6)).all()
        assert (got["far_mass"] == 0).all() if T <= 16 else (got["far_mass"] > 0).all()


@pytest.mark.parametrize("pos", ["alibi", "rope_qkv"])
def test_theory_measures_the_same_queries_at_every_length(pos):
    """Layer 0 sees embeddings only. There the last query's near part depends on the last tokens alone, however long the
    text, but for the mass that the far keys take away."""
    model, ids = tiny(pos=pos, block_size=8), tokens(64)
    short, long = (theory.diagnose(model, ids[-T:], 0)[0] for T in (8, 64))
    assert short["near_norm"].shape == long["near_norm"].shape == (2, 12, 4)
    near = long["near_norm"] / (1 - long["far_mass"])
    torch.testing.assert_close(near[0, :, -1], short["near_norm"][0, :, -1], rtol=1e-4, atol=1e-6)
    assert (short["far_mass"] == 0).all() and (long["far_mass"] > 1e-9).all()


def test_theory_coherence_of_routes_that_do_not_rotate_planes():
    """Any route with enter and leave: a reflection in the same plane at every step is rigid at even distances and, for
    a vector with a part across it, the same matrix at odd ones; random ones mix."""
    class Mirrors:
        def __init__(self, w):                                                                # (T, D) unit vectors
            T, D = w.shape
            prefix, rows = torch.eye(D, dtype=w.dtype), []
            for t in range(T):
                prefix = (torch.eye(D, dtype=w.dtype) - 2 * torch.outer(w[t], w[t])) @ prefix
                rows.append(prefix)
            self.A = torch.stack(rows)                                                        # (T, D, D)

        def enter(self, x):
            return torch.einsum("tji,...tj->...ti", self.A, x)

        def leave(self, x):
            return torch.einsum("tij,...tj->...ti", self.A, x)
    T, D = 3000, 6
    w = torch.randn(T, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    w = w / w.norm(dim=-1, keepdim=True)
    probe = torch.zeros(1, 1, T, D, dtype=torch.float64)
    rigid = theory.coherence(Mirrors(w[:1].expand(T, D)), probe, [1, 2, 3])
    mixing = theory.coherence(Mirrors(w), probe, [1, 2, 4, 16])
    assert rigid.shape == (1, 3, 1) and rigid.flatten().tolist() == pytest.approx([1, 1, 1])
    # the mean vector has length (1 - 2/d)^n, plus noise of about T^-1/2
    assert mixing.flatten().tolist() == pytest.approx([(1 - 2 / D) ** n for n in (1, 2, 4, 16)], abs=0.06)


def test_theory_memory_grows_with_the_text_and_not_with_its_square():
    """At 24,576 tokens one head's square of float32 would be 2.4 GB; a fresh process stays far below."""
    script = ("import resource, torch; torch.set_num_threads(1); import theory; from model import GPT, GPTConfig\n"
              "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
              "model = GPT(GPTConfig(pos='accrot_qkv', vocab_size=70, block_size=64, n_layer=1, n_head=2, n_embd=16)).eval()\n"
              "model.blocks[0].forward = lambda x, *_: x  # its attention is linear in memory but slow\n"
              "found, route = theory.diagnose(model, torch.zeros(24_576, dtype=torch.int64), 0, [1, 64, 8192])\n"
              "assert found['far_mass'].shape == (1, 2, 32) and route.shape == (1, 2, 3, 4)\n"
              "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) // 1024)")
    done = subprocess.run([sys.executable, "-c", script], cwd=HERE, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200, f"{done.stdout} MB"


# ---------------------------------------------------------------- theory.py: the program

def test_theory_prints_the_same_every_time_and_draws_if_it_can(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    assert theory.main([f"--plot={tmp_path}/p.png"]) == 0
    tables, picture = capsys.readouterr().out.split("picture: ")
    assert picture.strip() == f"{tmp_path}/p.png" and (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    for word in ("1. Mixing window", "2. Score gap", "3. Far mass", "4. Values", "776,903,230", "1,526"):
        assert word in tables.replace("1.53e+06", "1,526")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert theory.main([f"--plot={tmp_path}/none.png"]) == 0
    again = capsys.readouterr().out
    assert again.startswith(tables) and "pip install matplotlib" in again and not (tmp_path / "none.png").exists()


def test_theory_measures_checkpoints(trained, tmp_path, capsys):
    flags = ["--lengths=32,50,256", f"--json={tmp_path}/t.json", "--texts=3"]
    assert theory.main([f"--ckpt={trained['rope']}", trained["accrot_qkv"], *flags]) == 0
    shown, results = capsys.readouterr().out, json.loads((tmp_path / "t.json").read_text())
    assert [r["label"] for r in results] == ["rope", "accrot_qkv"] and "Far mass" in shown and "layer 1 head 1" in shown
    for r in results:
        assert [row["length"] for row in r["lengths"]] == [32, 50, 256] and r["distances"] == [1, 2, 4, 8, 16, 32, 64, 128]
        assert np.shape(r["coherence"]) == (2, 2, 8, 8)
        for row in r["lengths"]:
            values = {name: np.array(row[name]) for name in theory.MEASURED}
            assert all(v.shape == (2, 2) and np.isfinite(v).all() for v in values.values())
            assert (values["bound"] <= values["mean_bound"] + 1e-9).all() and (values["mean_bound"] <= values["far_mass"] + 1e-6).all()
            assert (values["far_mass"] > 0).all() == (row["length"] > 32)
            assert ((0 <= values["alignment"]) & (values["alignment"] <= 1 + 1e-6)).all()
    assert np.allclose(results[0]["coherence"], 1, atol=1e-5)                                 # RoPE is rigid
    assert theory.main(["--ckpt", trained["rope"], trained["accrot_qkv"], *flags[:1], f"--json={tmp_path}/again.json", "--texts=3"]) == 0
    assert json.loads((tmp_path / "again.json").read_text()) == results


@pytest.mark.parametrize("flags, word", [
    (["--ckpt=/nonexistent/ckpt.pt"], "nonexistent"), (["--lengths=32,1000000"], "1000000"), (["--lengths=1"], "lengths"),
    (["--lengths=0"], "lengths"), (["--length=32"], "length"), (["--texts=0"], "texts"), (["--data=/nonexistent"], "nonexistent"),
    (["--json=/nonexistent/t.json"], "json"), (["--plot=/nonexistent/p.png"], "plot"), (["--plot=p.jpeg2"], "plot")])
def test_theory_refuses_by_name(trained, flags, word, capsys):
    try:
        status = theory.main([f"--ckpt={trained['rope']}", *flags])
    except SystemExit as stop:
        status = stop.code
    message = capsys.readouterr().err
    assert status == 2 and word in message.splitlines()[-1]


@pytest.mark.parametrize("flag", ["--lengths=64", "--json=t.json", "--data=data/stdlib"])
def test_theory_refuses_what_only_a_checkpoint_can_use(flag, capsys):
    assert theory.main([flag]) == 2
    message = capsys.readouterr().err
    assert flag.split("=")[0][2:] in message and "--ckpt" in message and message.count("\n") == 1


def test_theory_refuses_other_data(trained, tmp_path, capsys):
    folder = tmp_path / "other"
    shutil.copytree(load(Path(trained["rope"]).parent)["train"]["data"], folder)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"tokenizer": "gpt2"}))
    assert theory.main([f"--ckpt={trained['rope']}", f"--data={folder}"]) == 2
    message = capsys.readouterr().err
    assert "data=" in message and "gpt2" in message and "bytes" in message
