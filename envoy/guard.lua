-- The guard: an answer to a rewritten request that ext_proc did not answer is vLLM's one-token prefill answer. It must not reach
-- the client, who would take it for the whole answer.
function envoy_on_response(handle)
  local metadata = handle:streamInfo():dynamicMetadata():get("anchorleg")
  if metadata == nil or not metadata["rewritten"] then
    return
  end
  local headers = handle:headers()
  if headers:get("x-anchorleg-answered") then
    headers:remove("x-anchorleg-answered")
    return
  end
  local error = '{"error":{"message":"the latency lane was lost before the answer; send the request again",'
    .. '"type":"upstream_error","param":null,"code":"lane_lost"}}'
  headers:replace(":status", "502")
  headers:replace("content-type", "application/json")
  headers:remove("content-length")
  handle:body(true):setBytes(error)
end
