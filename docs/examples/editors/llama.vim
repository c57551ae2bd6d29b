" Before the plugin llama.vim loads. Older versions read endpoint, newer ones endpoint_fim.
let g:llama_config = {
    \ 'endpoint': 'http://127.0.0.1:8000/infill',
    \ 'endpoint_fim': 'http://127.0.0.1:8000/infill',
    \ 'n_predict': 64,
    \ 'ring_n_chunks': 4,
    \ }
