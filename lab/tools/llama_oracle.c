// What llama.cpp itself makes of a GGUF file, for llama_oracle.py.
//   logits FILE ID...        float32 logits of every id, one row after the other, on standard output
//   quantize FILE OUT FTYPE  FTYPE: a number of enum llama_ftype
//   tokens FILE              reads texts, each behind its length (int32), and writes ids, each list behind its length
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "llama.h"

static void quietly(enum ggml_log_level level, const char * text, void * user) {
    (void) user;
    if (level == GGML_LOG_LEVEL_ERROR || getenv("ORACLE_LOG")) fputs(text, stderr);
}

static int logits(struct llama_model * model, int count, char ** ids) {
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = 256;
    params.n_threads = params.n_threads_batch = 1;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    struct llama_context * context = llama_init_from_model(model, params);
    if (!context) return 1;
    struct llama_batch batch = llama_batch_init(count, 0, 1);
    for (int i = 0; i < count; i++) {
        batch.token[i] = atoi(ids[i]);
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    batch.n_tokens = count;
    if (llama_decode(context, batch) != 0) return 1;
    int words = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (int i = 0; i < count; i++) fwrite(llama_get_logits_ith(context, i), sizeof(float), words, stdout);
    return 0;
}

static int tokens(struct llama_model * model) {
    int size;
    while (fread(&size, sizeof size, 1, stdin) == 1) {
        char * text = malloc(size + 1);
        llama_token * ids = malloc((size + 16) * sizeof *ids);
        if (fread(text, 1, size, stdin) != (size_t) size) return 1;
        int count = llama_tokenize(llama_model_get_vocab(model), text, size, ids, size + 16, true, true);
        if (count < 0) return 1;
        fwrite(&count, sizeof count, 1, stdout);
        fwrite(ids, sizeof *ids, count, stdout);
        free(text);
        free(ids);
    }
    return 0;
}

int main(int argc, char ** argv) {
    llama_log_set(quietly, NULL);
    if (argc < 3) return 2;
    if (!strcmp(argv[1], "quantize") && argc == 5) {
        struct llama_model_quantize_params params = llama_model_quantize_default_params();
        params.nthread = 1;
        params.ftype = atoi(argv[4]);
        params.allow_requantize = true;
        return llama_model_quantize(argv[2], argv[3], &params);
    }
    struct llama_model_params params = llama_model_default_params();
    params.vocab_only = !strcmp(argv[1], "tokens");
    struct llama_model * model = llama_model_load_from_file(argv[2], params);
    if (!model) return 1;
    return params.vocab_only ? tokens(model) : logits(model, argc - 3, argv + 3);
}
