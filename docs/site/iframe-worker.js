// Browsers refuse a worker to a page that was opened as a file, so there the search's worker runs in a
// hidden frame. The name is the one for which Zensical's offline plugin looks, so that it takes none from elsewhere.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const scope = this.frame.contentWindow
      scope.postMessage = data => this.send(this, data)
      const script = scope.document.createElement("script")
      this.isReady = new Promise(resolve => (script.onload = resolve))
      script.src = new URL(url, document.baseURI)
      scope.document.body.append(script)
    }
    postMessage(data) {
      this.isReady.then(() => this.send(this.frame.contentWindow, data))
    }
    send(receiver, data) {
      const copy = structuredClone(data) // as between threads
      setTimeout(() => receiver?.onmessage?.({ data: copy }))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
