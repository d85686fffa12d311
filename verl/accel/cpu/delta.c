/* One token of gated delta nets, included by kernels.c: one pass over the state of each head. */

static inline float sigmoid_of(float x) { return 1.0f / (1.0f + expf(-x)); }

static inline void to_unit(float *x, long n, float times) {
    const float f = times / sqrtf(dot(x, x, n) + 1e-6f);
    for (long i = 0; i < n; i++) x[i] *= f;
}

/* given [n, C + H V + 2 H]: queries, keys and values (C channels), gates, the inputs of rates and of decays ·
 * taps [window + 1, C], the token's own last · decays, steps [H] · norm [V] · windows [n, window, C] and
 * states [n, H, K, V] are updated · out [n, H V] · mixed: scratch [n, C] */
void delta_step(
    const float *given, const float *taps, const float *decays, const float *steps, const float *norm, float *windows, float *states,
    float *out, float *mixed, long n, long key_heads, long heads, long inner, long width, long window, float eps, long threads) {
    const long keys = key_heads * inner, channels = 2 * keys + heads * width, all = channels + heads * width + 2 * heads;
    const long each = heads / key_heads;
    if (n * heads * inner * width < WORTH_A_TEAM) threads = 1;
#pragma omp parallel for num_threads(threads)
    for (long r = 0; r < n; r++) {
        const float *x = given + r * all, *own = taps + window * channels;
        float *past = windows + r * window * channels, *y = mixed + r * channels;
        for (long c = 0; c < channels; c++) y[c] = own[c] * x[c];
        for (long t = 0; t < window; t++)
            for (long c = 0; c < channels; c++) y[c] += taps[t * channels + c] * past[t * channels + c];
        for (long c = 0; c < channels; c++) y[c] = y[c] / (1.0f + exp_fast(-y[c]));
        if (window) {
            memmove(past, past + channels, sizeof(float) * (window - 1) * channels);
            memcpy(past + (window - 1) * channels, x, sizeof(float) * channels);
        }
        for (long h = 0; h < key_heads; h++) {
            to_unit(y + h * inner, inner, 1.0f / sqrtf((float)inner));
            to_unit(y + keys + h * inner, inner, 1.0f);
        }
    }
#pragma omp parallel for collapse(2) num_threads(threads)
    for (long r = 0; r < n; r++) {
        for (long h = 0; h < heads; h++) {
            const float *x = given + r * all + channels, *gate = x + h * width, *rate = x + heads * width, *decay = rate + heads;
            const float *q = mixed + r * channels + h / each * inner, *k = q + keys;
            const float *v = mixed + r * channels + 2 * keys + h * width;
            float *state = states + (r * heads + h) * inner * width, *y = out + (r * heads + h) * width;
            const float a = decay[h] + steps[h], soft = a > 20.0f ? a : log1pf(expf(a)), kept = expf(-expf(decays[h]) * soft);
            const float share = sigmoid_of(rate[h]);
            float change[width];
            memset(change, 0, sizeof(float) * width);
            memset(y, 0, sizeof(float) * width);
            for (long i = 0; i < inner; i++) {
                const float *line = state + i * width, ki = k[i];
                for (long d = 0; d < width; d++) change[d] += ki * line[d];
            }
            for (long d = 0; d < width; d++) change[d] = share * (v[d] - kept * change[d]);
            for (long i = 0; i < inner; i++) {
                float *line = state + i * width;
                const float ki = k[i], qi = q[i];
                for (long d = 0; d < width; d++) {
                    line[d] = kept * line[d] + ki * change[d];
                    y[d] += qi * line[d];
                }
            }
            const float f = 1.0f / sqrtf(dot(y, y, width) / width + eps);
            for (long d = 0; d < width; d++) y[d] = norm[d] * (y[d] * f) * (gate[d] * sigmoid_of(gate[d]));
        }
    }
}
